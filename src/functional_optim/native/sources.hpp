// Addresses of tensors that have recorded layouts.

#pragma once

#include <algorithm>
#include <map>
#include <vector>

#include "places.hpp"

namespace {

struct Source {
  const char* from;
  size_t bytes;
};

// Find the address and size of the i-th tensor. Return false unless it has the recorded layout, and
// its storage is large enough.
bool find_source(PyObject* list, Py_ssize_t i, Py_ssize_t end, const Places& places, Source& source) {
  fetch_ahead(list, i, end, false, true);
  const Trait& trait = places.traits[i];
  const at::TensorImpl* impl = plain(PyList_GET_ITEM(list, i));
  if (impl == nullptr || !alike(impl, trait, places.dims.data() + trait.dims)) {
    return false;
  }
  source = {nullptr, trait.bytes};
  if (trait.bytes > 0) {
    const size_t before = static_cast<size_t>(impl->storage_offset()) * impl->itemsize();
    if (before + trait.bytes > impl->unsafe_storage().nbytes()) {
      return false;
    }
    source.from = address_of(impl);
  }
  return true;
}

// layouts(tensors) -> for each tensor the index of the first one with the same layout; its own index for
// any other value than a plain, strided leaf of autograd
PyObject* layouts(PyObject*, PyObject* list) {
  if (!PyList_CheckExact(list)) {
    PyErr_SetString(PyExc_TypeError, "layouts() takes a list of tensors");
    return nullptr;
  }
  const Py_ssize_t length = PyList_GET_SIZE(list);
  PyObject* found = PyList_New(length);
  std::map<std::vector<int64_t>, Py_ssize_t> firsts;
  std::vector<int64_t> key;
  for (Py_ssize_t i = 0; found != nullptr && i < length; ++i) {
    fetch_ahead(list, i, length);
    PyObject* object = PyList_GET_ITEM(list, i);
    const at::TensorImpl* impl = plain(object);
    Py_ssize_t first = i;
    if (impl != nullptr && impl->layout() == c10::kStrided && !impl->has_symbolic_sizes_strides() &&
        THPVariable_Unpack(object).is_leaf()) {
      key = {static_cast<int64_t>(keys_of(impl)), impl->device().index(), THPVariable_Unpack(object).is_inference(),
             static_cast<int64_t>(c10::typeMetaToScalarType(impl->dtype()))};
      key.insert(key.end(), impl->sizes().begin(), impl->sizes().end());
      key.insert(key.end(), impl->strides().begin(), impl->strides().end());
      first = firsts.emplace(key, i).first->second;
    }
    PyList_SET_ITEM(found, i, PyLong_FromSsize_t(first));
  }
  return found;
}

// Return true if some of these bytes are in one of the sorted spans.
bool among(const std::vector<Span>& spans, const Source& source) {
  const char* end = source.from + source.bytes;
  const auto after = std::lower_bound(
      spans.begin(), spans.end(), end,
      [](const Span& span, const char* place) { return span.begin < place; });
  return after != spans.begin() && source.from < std::prev(after)->end;
}

// Record layouts; return false if a tensor is not plain and strided.
bool record_in(PyObject* list, Places& places) {
  try {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
      const at::TensorImpl* impl = plain(PyList_GET_ITEM(list, i));
      if (impl == nullptr || impl->layout() != c10::kStrided || !impl->has_storage() ||
          impl->has_symbolic_sizes_strides()) {
        return false;
      }
      const auto sizes = impl->sizes();
      const auto strides = impl->strides();
      places.traits.push_back(
          {keys_of(impl),
           impl->dtype(),
           impl->device(),
           places.dims.size(),
           sizes.size(),
           static_cast<size_t>(impl->numel()) * impl->itemsize()});
      places.dims.insert(places.dims.end(), sizes.begin(), sizes.end());
      places.dims.insert(places.dims.end(), strides.begin(), strides.end());
      places.dense = places.dense && (impl->is_cpu() || impl->is_cuda()) &&
          impl->is_non_overlapping_and_dense_or_false();
    }
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

}  // namespace
