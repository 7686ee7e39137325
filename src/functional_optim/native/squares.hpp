// Squares of norms in double precision, with the bits of torch's norms, squared.
//
// A row is as many elements as torch's vectors of doubles have lanes. Rows are added lane by lane;
// then the lanes are added from the first to the last, and the elements behind the last row follow.
// Squares of floats are exact in double precision. Each addition waits for the last, so several
// stretches of memory are added up at once, which changes no sum.

#pragma once

#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

#include "places.hpp"

namespace {

constexpr int kStreams = 4;          // stretches that are added up at once
constexpr int64_t kWorth = 1 << 20;  // elements for which a thread is begun

struct Stretch {
  const char* begin;
  int64_t count;  // of elements
  double sum = 0.0;
};

template <typename T, int L>
struct Vector {
  typedef T Type __attribute__((vector_size(L * sizeof(T))));
};

// Of elements of T, which are floats or the upper halves of floats, L at a time.
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

  // A stretch that is being added up.
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

    void add(int64_t count) {
      for (int64_t i = 0; i < count; ++i, next += sizeof(Elements)) {
        const Doubles own = at(next);
        sums += own * own;
      }
      rows -= count;
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
      const double norm = std::sqrt(sum);
      stretch->sum = norm * norm;
    }
  };

  static void add_all(Stretch* next, Stretch* end) {
    Stream streams[kStreams];
    int active = 0;
    while (active < kStreams && next < end) {
      streams[active++].begin(next++);
    }
    while (active == kStreams) {
      int64_t rows = streams[0].rows;
      for (const Stream& one : streams) {
        rows = std::min(rows, one.rows);
      }
      Doubles a = streams[0].sums, b = streams[1].sums, c = streams[2].sums, d = streams[3].sums;
      const char *p = streams[0].next, *q = streams[1].next, *r = streams[2].next, *s = streams[3].next;
      for (int64_t i = 0; i < rows; ++i) {
        const size_t by = i * sizeof(Elements);
        const Doubles w = at(p + by), x = at(q + by), y = at(r + by), z = at(s + by);
        a += w * w;
        b += x * x;
        c += y * y;
        d += z * z;
      }
      streams[0].sums = a, streams[1].sums = b, streams[2].sums = c, streams[3].sums = d;
      for (Stream& one : streams) {
        one.next += rows * sizeof(Elements);
        one.rows -= rows;
      }
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
    for (int k = 0; k < active; ++k) {
      streams[k].add(streams[k].rows);
      streams[k].end();
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

// Add up all stretches in at most so many threads, each of which has work enough.
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
      break;  // there is no thread more: this one does the rest
    }
    begin = until;
    left -= own;
  }
  add_up(begin, end, is_float, lanes);
  for (std::thread& one : threads) {
    one.join();
  }
}

// Whether a tensor's values are not what is in its memory: it stands for another, or is negated.
bool is_wrapped(const at::TensorImpl* impl) {
  static const c10::DispatchKeySet keys{
      c10::DispatchKey::Negative,         c10::DispatchKey::Conjugate,
      c10::DispatchKey::ZeroTensor,       c10::DispatchKey::Functionalize,
      c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
      c10::DispatchKey::Python};
  return impl->key_set().has_any(keys);
}

// The stretches of tensors, of at most `most` elements each; false unless all are contiguous floats,
// or all contiguous bfloat16, on the CPU.
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

// squares(tensors, most, lanes, threads) -> the square of the norm of each tensor, or of each of its parts of
// so many elements, as a list; None where torch has to be asked
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
  std::vector<Stretch> every;
  bool is_float = true;
  try {
    if (!stretches_of(args[0], most, every, is_float)) {
      Py_RETURN_NONE;
    }
  } catch (const std::exception&) {
    Py_RETURN_NONE;
  }
  Py_BEGIN_ALLOW_THREADS;
  add_up_in_threads(every, is_float, static_cast<int>(lanes), threads);
  Py_END_ALLOW_THREADS;
  PyObject* found = PyList_New(every.size());
  for (size_t i = 0; found != nullptr && i < every.size(); ++i) {
    PyObject* sum = PyFloat_FromDouble(every[i].sum);
    if (sum == nullptr) {
      Py_CLEAR(found);
    } else {
      PyList_SET_ITEM(found, i, sum);
    }
  }
  return found;
}

}  // namespace
