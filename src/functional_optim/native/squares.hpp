// Norms and squared norms in double precision, with the bits of torch's norms.
//
// A row has as many elements as torch's vectors of doubles have lanes. Rows are added lane by lane.
// Then the lanes are added, from first to last, and then the elements after the last row. Squares of
// floats are exact in double precision. Each addition depends on the previous one, so several ranges
// of memory are summed at the same time. This changes no sum.

#pragma once

#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

#include "places.hpp"

namespace {

constexpr int kStreams = 4;          // ranges that are summed at the same time
constexpr int64_t kWorth = 1 << 20;  // elements per thread

struct Stretch {
  const char* begin;
  int64_t count;  // number of elements
  double norm = 0.0;
};

template <typename T, int L>
struct Vector {
  typedef T Type __attribute__((vector_size(L * sizeof(T))));
};

// Sums L elements of T at a time: floats, or bfloat16 (the upper halves of floats).
template <typename T, int L>
struct Row {
  using Elements = typename Vector<T, L>::Type;
  using Bits = typename Vector<uint32_t, L>::Type;
  using Floats = typename Vector<float, L>::Type;
  using Doubles = typename Vector<double, L>::Type;

  static Doubles at(const char* from) {
    Elements own;
    std::memcpy(&own, from, sizeof own);
    if constexpr (std::is_same_v<T, float>) {
      return __builtin_convertvector(own, Doubles);
    } else {
      const Bits bits = __builtin_convertvector(own, Bits) << 16;
      Floats floats;
      std::memcpy(&floats, &bits, sizeof floats);
      return __builtin_convertvector(floats, Doubles);
    }
  }

  static double one_at(const char* from) {
    if constexpr (std::is_same_v<T, float>) {
      float own;
      std::memcpy(&own, from, sizeof own);
      return own;
    } else {
      uint16_t own;
      std::memcpy(&own, from, sizeof own);
      const uint32_t bits = static_cast<uint32_t>(own) << 16;
      float value;
      std::memcpy(&value, &bits, sizeof value);
      return value;
    }
  }

  // Partial sums of one range.
  struct Stream {
    Stretch* stretch = nullptr;
    const char* next = nullptr;
    int64_t rows = 0;
    Doubles sums = {};

    void begin(Stretch* of) {
      stretch = of;
      next = of->begin;
      rows = of->count / L;
      sums = Doubles{};
    }

    void end() {
      double sum = sums[0];
      for (int k = 1; k < L; ++k) {
        sum += sums[k];
      }
      const char* last = stretch->begin + stretch->count * sizeof(T);
      for (; next < last; next += sizeof(T)) {
        const double own = one_at(next);
        sum += own * own;
      }
      stretch->norm = std::sqrt(sum);
    }
  };

  // Add rows of N streams, as many as the shortest stream has. The sums stay in registers.
  template <int N>
  static void add_rows(Stream* streams) {
    int64_t rows = streams[0].rows;
    Doubles sums[N];
    const char* next[N];
    for (int k = 0; k < N; ++k) {
      rows = std::min(rows, streams[k].rows);
      sums[k] = streams[k].sums;
      next[k] = streams[k].next;
    }
    for (int64_t i = 0; i < rows; ++i) {
#pragma GCC unroll 4
      for (int k = 0; k < N; ++k) {
        const Doubles own = at(next[k] + i * sizeof(Elements));
        sums[k] += own * own;
      }
    }
    for (int k = 0; k < N; ++k) {
      streams[k].sums = sums[k];
      streams[k].next += rows * sizeof(Elements);
      streams[k].rows -= rows;
    }
  }

  static void add_all(Stretch* next, Stretch* end) {
    Stream streams[kStreams];
    int active = 0;
    while (active < kStreams && next < end) {
      streams[active++].begin(next++);
    }
    while (active > 0) {
      active == 4 ? add_rows<4>(streams)
      : active == 3 ? add_rows<3>(streams)
      : active == 2 ? add_rows<2>(streams)
                    : add_rows<1>(streams);
      for (int k = 0; k < active; ++k) {
        if (streams[k].rows == 0) {
          streams[k].end();
          if (next < end) {
            streams[k].begin(next++);
          } else {
            std::swap(streams[k--], streams[--active]);
          }
        }
      }
    }
  }
};

void add_up(Stretch* begin, Stretch* end, bool is_float, int lanes) {
  if (lanes == 4) {
    is_float ? Row<float, 4>::add_all(begin, end) : Row<uint16_t, 4>::add_all(begin, end);
  } else {
    is_float ? Row<float, 8>::add_all(begin, end) : Row<uint16_t, 8>::add_all(begin, end);
  }
}

// Sum all ranges with at most this many threads, each with enough work.
void add_up_in_threads(std::vector<Stretch>& every, bool is_float, int lanes, int64_t most) {
  int64_t left = 0;
  for (const Stretch& one : every) {
    left += one.count;
  }
  const int64_t each = std::max(left / std::max<int64_t>(most, 1) + 1, kWorth);
  std::vector<std::thread> threads;
  Stretch *begin = every.data(), *end = begin + every.size();
  while (left > each) {
    Stretch* until = begin;
    int64_t own = 0;
    while (own < each) {
      own += (until++)->count;
    }
    try {
      threads.emplace_back(add_up, begin, until, is_float, lanes);
    } catch (const std::system_error&) {
      break;  // no more threads can be started: this thread does the rest
    }
    begin = until;
    left -= own;
  }
  add_up(begin, end, is_float, lanes);
  for (std::thread& one : threads) {
    one.join();
  }
}

// Return true if the memory of a tensor does not have its values: a zero tensor, or a negative view.
bool is_wrapped(const at::TensorImpl* impl) {
  static const c10::DispatchKeySet keys{
      c10::DispatchKey::Negative,         c10::DispatchKey::Conjugate,
      c10::DispatchKey::ZeroTensor,       c10::DispatchKey::Functionalize,
      c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
      c10::DispatchKey::Python};
  return impl->key_set().has_any(keys);
}

// List the ranges of tensors, of at most `most` elements each. Return false unless all tensors are
// contiguous floats, or all contiguous bfloat16, on the CPU.
bool stretches_of(PyObject* list, int64_t most, std::vector<Stretch>& found, bool& is_float) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    fetch_ahead(list, i, PyList_GET_SIZE(list));
    const at::TensorImpl* impl = plain(PyList_GET_ITEM(list, i));
    if (impl == nullptr || impl->layout() != c10::kStrided || !impl->is_cpu() ||
        impl->has_symbolic_sizes_strides() || !impl->is_contiguous() || is_wrapped(impl) ||
        THPVariable_Unpack(PyList_GET_ITEM(list, i))._fw_grad(0).defined()) {
      return false;
    }
    const bool own = impl->dtype() == caffe2::TypeMeta::Make<float>();
    if ((!own && impl->dtype() != caffe2::TypeMeta::Make<c10::BFloat16>()) ||
        (i > 0 && own != is_float)) {
      return false;
    }
    is_float = own;
    const char* begin = address_of(impl);
    int64_t left = impl->numel();
    if (begin == nullptr && left > 0) {
      return false;
    }
    do {
      const int64_t count = std::min(left, most);
      found.push_back({begin, count});
      begin += count * impl->itemsize();
      left -= count;
    } while (left > 0);
  }
  return true;
}

// Return the norm of each tensor or each of its parts, or its square; null without an error if torch
// must compute them.
PyObject* norms_of(PyObject* list, int64_t most, int lanes, int64_t threads, bool squared) {
  std::vector<Stretch> every;
  bool is_float = true;
  try {
    if (!stretches_of(list, most, every, is_float)) {
      return nullptr;
    }
  } catch (const std::exception&) {
    return nullptr;
  }
  Py_BEGIN_ALLOW_THREADS;
  add_up_in_threads(every, is_float, lanes, threads);
  Py_END_ALLOW_THREADS;
  PyObject* found = PyList_New(every.size());
  for (size_t i = 0; found != nullptr && i < every.size(); ++i) {
    const double norm = every[i].norm;
    PyObject* one = PyFloat_FromDouble(squared ? norm * norm : norm);
    if (one == nullptr) {
      Py_CLEAR(found);
    } else {
      PyList_SET_ITEM(found, i, one);
    }
  }
  return found;
}

// Return the result of norms_of; None if torch must compute the norms.
PyObject* found_or_none(PyObject* found) {
  if (found == nullptr && PyErr_Occurred() == nullptr) {
    Py_RETURN_NONE;
  }
  return found;
}

// squares(tensors, most, lanes, threads) -> list of the squared norm of each part of each tensor, where a
// part has at most `most` elements; None if torch must compute them
PyObject* squares(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 4 || !PyList_CheckExact(args[0])) {
    PyErr_SetString(PyExc_TypeError, "squares() takes a list of tensors and three numbers");
    return nullptr;
  }
  const long long most = PyLong_AsLongLong(args[1]), lanes = PyLong_AsLongLong(args[2]);
  const long long threads = PyLong_AsLongLong(args[3]);
  if (PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  if (most < 1 || (lanes != 4 && lanes != 8)) {
    PyErr_SetString(PyExc_ValueError, "parts have an element or more, and rows 4 or 8 lanes");
    return nullptr;
  }
  return found_or_none(norms_of(args[0], most, static_cast<int>(lanes), threads, true));
}

// norms(tensors, lanes, threads) -> list of the norm of each tensor; None if torch must compute them
PyObject* norms(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3 || !PyList_CheckExact(args[0])) {
    PyErr_SetString(PyExc_TypeError, "norms() takes a list of tensors and two numbers");
    return nullptr;
  }
  const long long lanes = PyLong_AsLongLong(args[1]), threads = PyLong_AsLongLong(args[2]);
  if (PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  if (lanes != 4 && lanes != 8) {
    PyErr_SetString(PyExc_ValueError, "rows have 4 or 8 lanes");
    return nullptr;
  }
  const int64_t whole = std::numeric_limits<int64_t>::max();
  return found_or_none(norms_of(args[0], whole, static_cast<int>(lanes), threads, false));
}

}  // namespace
