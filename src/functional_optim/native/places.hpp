// What tensors are like, and where they lie: remembered, and looked at again.

#pragma once

#include <Python.h>

#include <algorithm>
#include <vector>

#include "variable.hpp"

namespace {

constexpr const char* kName = "functional_optim.plan.places";
constexpr int kAhead = 8;  // tensors that are fetched from memory before they are looked at

// What a tensor is like, and where it lies.
struct Trait {
  uint64_t keys;
  caffe2::TypeMeta dtype;
  c10::Device device;
  size_t dims;  // where its sizes, and behind them its strides, stand
  size_t dim;
  const char* address;
  size_t bytes;
  size_t storage;  // the bytes of all the memory that it is a part of
};

struct Span {
  const char* begin;
  const char* end;
};

struct Places {
  std::vector<Trait> traits;
  std::vector<Span> spans;  // of all memory that they are parts of
  std::vector<int64_t> dims;
  bool dense = true;  // in memory that has addresses
  bool on_cpu = true;  // so that, if dense, copying one is copying its bytes
  // Of a layout (see trees.hpp), for each tensor:
  std::vector<char> written;      // whether a step writes to it
  std::vector<Py_ssize_t> slots;  // the position of its pointer in the table, or -1
  Py_ssize_t pointers = 0;        // in the table
  std::vector<const char*> last;  // the addresses at which the tensors were last found to be disjoint
  std::vector<Span> closed;       // the memory of those that are written, in order
};

uint64_t keys_of(const at::TensorImpl* impl) {
  // It matters not whether a tensor requires grad.
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

// The tensor behind a Python object; null for anything but a plain tensor or parameter.
const at::TensorImpl* plain(PyObject* object) {
  return THPVariable_CheckExact(object) ? THPVariable_Unpack(object).unsafeGetTensorImpl()
                                        : nullptr;
}

// Bring objects that come soon into the cache: that is what takes the time.
void fetch_ahead(PyObject* list, Py_ssize_t i, Py_ssize_t count, bool versions = false) {
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
    if (impl != nullptr && versions) {
      // It holds a pointer to the number, and nothing else.
      __builtin_prefetch(*reinterpret_cast<void* const*>(&impl->version_counter()));
    }
  }
}

// The same for what leads to a tensor's gradient.
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
