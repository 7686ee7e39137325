// Sources of a copy: their addresses, and checks that they can be copied.

#pragma once

#include <algorithm>
#include <vector>

#include "places.hpp"

namespace {

struct Copy {
  char* to;
  const char* from;
  size_t bytes;
};

// Find the address and size of the i-th tensor. Return false unless it has the recorded layout, and
// its storage is large enough.
bool find_source(PyObject* list, Py_ssize_t i, Py_ssize_t end, const Places& places, Copy& copy) {
  fetch_ahead(list, i, end);
  const Trait& trait = places.traits[i];
  const at::TensorImpl* impl = plain(PyList_GET_ITEM(list, i));
  if (impl == nullptr || !alike(impl, trait, places.dims.data() + trait.dims)) {
    return false;
  }
  copy = {nullptr, nullptr, trait.bytes};
  if (trait.bytes > 0) {
    const size_t before = static_cast<size_t>(impl->storage_offset()) * impl->itemsize();
    if (before + trait.bytes > impl->unsafe_storage().nbytes()) {
      return false;
    }
    copy.from = address_of(impl);
  }
  return true;
}

// Sort spans, and join spans that overlap or touch.
void join(std::vector<Span>& spans) {
  std::sort(spans.begin(), spans.end(),
            [](const Span& one, const Span& other) { return one.begin < other.begin; });
  size_t kept = 0;
  for (const Span& span : spans) {
    if (kept > 0 && span.begin <= spans[kept - 1].end) {
      spans[kept - 1].end = std::max(span.end, spans[kept - 1].end);
    } else {
      spans[kept++] = span;
    }
  }
  spans.resize(kept);
}

// Return true if some of these bytes are in one of the sorted spans.
bool among(const std::vector<Span>& spans, const Copy& copy) {
  const char* end = copy.from + copy.bytes;
  const auto after = std::lower_bound(
      spans.begin(), spans.end(), end,
      [](const Span& span, const char* place) { return span.begin < place; });
  return after != spans.begin() && copy.from < std::prev(after)->end;
}

// Record layouts and addresses; return false if a tensor is not plain and strided.
bool remember_in(PyObject* list, Places& places) {
  try {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
      const at::TensorImpl* impl = plain(PyList_GET_ITEM(list, i));
      if (impl == nullptr || impl->layout() != c10::kStrided ||
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
           address_of(impl),
           static_cast<size_t>(impl->numel()) * impl->itemsize(),
           impl->unsafe_storage().nbytes()});
      places.dims.insert(places.dims.end(), sizes.begin(), sizes.end());
      places.dims.insert(places.dims.end(), strides.begin(), strides.end());
      const auto* base = static_cast<const char*>(impl->unsafe_storage().data());
      places.spans.push_back({base, base + places.traits.back().storage});
      places.on_cpu = places.on_cpu && impl->is_cpu();
      places.dense = places.dense && (impl->is_cpu() || impl->is_cuda()) &&
          impl->is_non_overlapping_and_dense_or_false();
    }
    join(places.spans);
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

// Return the records of a capsule if they are of as many dense tensors as the list has, and on the CPU
// if so requested. Otherwise return null, with an error if the capsule has no records.
const Places* places_for(PyObject* capsule, PyObject* list, bool on_cpu) {
  const Places* places = places_in(capsule);
  const bool fit = places != nullptr && places->dense && (places->on_cpu || !on_cpu) &&
      static_cast<size_t>(PyList_GET_SIZE(list)) == places->traits.size();
  return fit ? places : nullptr;
}

}  // namespace
