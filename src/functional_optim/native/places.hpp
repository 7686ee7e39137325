// Layouts of tensors: recorded, and compared later.

#pragma once

#include <Python.h>

#include <algorithm>
#include <vector>

#include "variable.hpp"

namespace {

constexpr const char* kName = "functional_optim.plan.places";
constexpr int kAhead = 8;  // tensors that are prefetched

// Layout of a tensor.
struct Trait {
  uint64_t keys;
  caffe2::TypeMeta dtype;
  c10::Device device;
  size_t dims;  // offset of its sizes, which its strides follow
  size_t dim;
  size_t bytes;
};

struct Span {
  const char* begin;
  const char* end;
};

struct Places {
  std::vector<Trait> traits;
  std::vector<int64_t> dims;
  bool dense = true;  // all tensors are dense in memory that has addresses
  // For each tensor:
  std::vector<char> writable;     // nonzero if a step writes to the tensor
  std::vector<char> written;      // nonzero if, besides, it may not share memory
  std::vector<Py_ssize_t> slots;  // position of its pointer in the table, or -1
  Py_ssize_t pointers = 0;        // number of pointers in the table
  std::vector<const char*> last;  // addresses at the last successful comparison
  std::vector<Span> closed;       // memory of written tensors, sorted
};

uint64_t keys_of(const at::TensorImpl* impl) {
  // requires_grad is ignored.
  return (impl->key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView).raw_repr();
}

const char* address_of(const at::TensorImpl* impl) {
  return static_cast<const char*>(impl->data());
}

bool alike(const at::TensorImpl* impl, const Trait& trait, const int64_t* dims) {
  if (keys_of(impl) != trait.keys || impl->dtype() != trait.dtype ||
      impl->has_symbolic_sizes_strides() || impl->device() != trait.device) {
    return false;
  }
  const auto sizes = impl->sizes();
  if (sizes.size() != trait.dim) {
    return false;
  }
  const auto strides = impl->strides();
  return std::equal(sizes.begin(), sizes.end(), dims) &&
      std::equal(strides.begin(), strides.end(), dims + trait.dim);
}

// Return the tensor of a Python object; null unless it is a plain tensor or parameter.
const at::TensorImpl* plain(PyObject* object) {
  return THPVariable_CheckExact(object) ? THPVariable_Unpack(object).unsafeGetTensorImpl()
                                        : nullptr;
}

// Return true if a tensor is a leaf of autograd: it has no grad_fn.
bool is_leaf(PyObject* object) {
  const at::Tensor& one = THPVariable_Unpack(object);
  return one.unsafeGetTensorImpl()->autograd_meta() == nullptr || one.is_leaf();
}

// Prefetch the next objects: cache misses take most of the time.
void fetch_ahead(PyObject* list, Py_ssize_t i, Py_ssize_t count, bool versions = false,
                 bool leaves = false) {
  if (i + 2 * kAhead < count) {
    __builtin_prefetch(PyList_GET_ITEM(list, i + 2 * kAhead));
  }
  if (i + kAhead < count) {
    PyObject* object = PyList_GET_ITEM(list, i + kAhead);
    if (THPVariable_CheckExact(object)) {
      const char* impl =
          reinterpret_cast<const char*>(THPVariable_Unpack(object).unsafeGetTensorImpl());
      for (size_t at = 0; at < sizeof(at::TensorImpl); at += 64) {
        __builtin_prefetch(impl + at);
      }
    }
  }
  if (i + kAhead / 2 < count) {
    const at::TensorImpl* impl = plain(PyList_GET_ITEM(list, i + kAhead / 2));
    if (impl != nullptr && impl->has_storage()) {
      __builtin_prefetch(impl->unsafe_storage().unsafeGetStorageImpl());
    }
    if (impl != nullptr && leaves && impl->autograd_meta() != nullptr) {
      __builtin_prefetch(impl->autograd_meta());
    }
    if (impl != nullptr && versions) {
      // The object has a pointer to the counter, and nothing else.
      __builtin_prefetch(*reinterpret_cast<void* const*>(&impl->version_counter()));
    }
  }
}

// Prefetch the path to the gradient of a tensor.
void fetch_gradient_ahead(PyObject* list, Py_ssize_t i, Py_ssize_t count) {
  if (i + 4 * kAhead < count) {
    __builtin_prefetch(PyList_GET_ITEM(list, i + 4 * kAhead));
  }
  if (i + 3 * kAhead < count) {
    const at::TensorImpl* impl = plain(PyList_GET_ITEM(list, i + 3 * kAhead));
    if (impl != nullptr) {
      __builtin_prefetch(impl);
      __builtin_prefetch(reinterpret_cast<const char*>(impl) + 64);
    }
  }
  if (i + 2 * kAhead < count) {
    const at::TensorImpl* impl = plain(PyList_GET_ITEM(list, i + 2 * kAhead));
    if (impl != nullptr && impl->autograd_meta() != nullptr) {
      __builtin_prefetch(impl->autograd_meta());
    }
  }
  if (i + kAhead < count) {
    const at::TensorImpl* impl = plain(PyList_GET_ITEM(list, i + kAhead));
    if (impl != nullptr && impl->autograd_meta() != nullptr) {
      __builtin_prefetch(impl->grad().unsafeGetTensorImpl());
    }
  }
}

Places* places_in(PyObject* capsule) {
  return static_cast<Places*>(PyCapsule_GetPointer(capsule, kName));
}

void destroy(PyObject* capsule) { delete places_in(capsule); }

}  // namespace
