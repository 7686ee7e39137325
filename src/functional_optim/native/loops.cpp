// Loops over lists of tensors. They take some nanoseconds per tensor; Python takes a tenth of a
// microsecond or more. They handle plain strided tensors only, and leave all other tensors to Python.

#include <Python.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "places.hpp"
#include "sources.hpp"
#include "squares.hpp"
#include "trees.hpp"

namespace {

// hold(layout, tensors) -> True if the tensors have the recorded layouts
PyObject* hold(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyList_CheckExact(args[1])) {
    PyErr_SetString(PyExc_TypeError, "hold() takes a layout and a list of tensors");
    return nullptr;
  }
  const Places* places = places_in(args[0]);
  if (places == nullptr) {
    return nullptr;
  }
  PyObject* list = args[1];
  const Py_ssize_t length = PyList_GET_SIZE(list);
  if (static_cast<size_t>(length) != places->traits.size()) {
    Py_RETURN_FALSE;
  }
  try {
    for (Py_ssize_t i = 0; i < length; ++i) {
      fetch_ahead(list, i, length);
      const Trait& trait = places->traits[i];
      const at::TensorImpl* impl = plain(PyList_GET_ITEM(list, i));
      if (impl == nullptr || !alike(impl, trait, places->dims.data() + trait.dims)) {
        Py_RETURN_FALSE;
      }
    }
  } catch (const std::exception&) {
    Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

// The tensors of a call: all tensors of a list, or some of them.
struct Some {
  PyObject* list = nullptr;
  std::vector<Py_ssize_t> places;
  Py_ssize_t size = 0;

  // The arguments are a list and, for some of its tensors, a list of positions.
  bool read(PyObject* const* args, Py_ssize_t count, const char* error) {
    const bool some = count == 2;
    if ((count != 1 && !some) || !PyList_CheckExact(args[0]) || (some && !PyList_CheckExact(args[1]))) {
      PyErr_SetString(PyExc_TypeError, error);
      return false;
    }
    list = args[0];
    size = PyList_GET_SIZE(some ? args[1] : list);
    places.resize(size);
    for (Py_ssize_t i = 0; i < size; ++i) {
      places[i] = some ? PyLong_AsSsize_t(PyList_GET_ITEM(args[1], i)) : i;
      if (places[i] < 0 || places[i] >= PyList_GET_SIZE(list)) {
        if (PyErr_Occurred() == nullptr) {
          PyErr_SetString(PyExc_IndexError, "a position is not one of the list");
        }
        return false;
      }
    }
    return true;
  }

  PyObject* operator[](Py_ssize_t i) const { return PyList_GET_ITEM(list, places[i]); }
};

// bump(tensors[, positions]): increment autograd's version counters
PyObject* bump(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Some some;
  if (!some.read(args, count, "bump() takes a list of tensors, and perhaps one of positions")) {
    return nullptr;
  }
  try {
    Py_ssize_t i = 0;
    for (; i < some.size && THPVariable_Check(some[i]); ++i) {
      fetch_ahead(some.list, some.places[i], PyList_GET_SIZE(some.list), true);
      THPVariable_Unpack(some[i]).unsafeGetTensorImpl()->bump_version();
    }
    if (i == some.size) {
      Py_RETURN_NONE;
    }
  } catch (const std::exception&) {
    // raise TypeError
  }
  PyErr_SetString(PyExc_TypeError, "bump() takes tensors that were not made in inference mode");
  return nullptr;
}

// grads(tensors) -> list of gradients or None; None for the list if Python must read them
PyObject* grads(PyObject*, PyObject* list) {
  if (!PyList_CheckExact(list)) {
    PyErr_SetString(PyExc_TypeError, "grads() takes a list of tensors");
    return nullptr;
  }
  const Py_ssize_t length = PyList_GET_SIZE(list);
  PyObject* found = PyList_New(length);
  if (found == nullptr) {
    return nullptr;
  }
  try {
    for (Py_ssize_t i = 0; i < length; ++i) {
      fetch_gradient_ahead(list, i, length);
      PyObject* object = PyList_GET_ITEM(list, i);
      const at::TensorImpl* impl = plain(object);
      if (impl == nullptr) {
        Py_DECREF(found);
        Py_RETURN_NONE;
      }
      const at::Tensor& grad = impl->grad();
      if (!grad.defined() && !THPVariable_Unpack(object).is_leaf()) {
        Py_DECREF(found);
        Py_RETURN_NONE;  // torch would warn
      }
      PyObject* one = THPVariable_Wrap(grad);  // None if there is no gradient
      if (one == nullptr) {
        Py_DECREF(found);
        return nullptr;
      }
      PyList_SET_ITEM(found, i, one);
    }
  } catch (const std::exception&) {
    Py_DECREF(found);
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  return found;
}

// Return the integers of a contiguous tensor; null for any other tensor.
int64_t* numbers_of(PyObject* object) {
  const at::TensorImpl* impl = plain(object);
  if (impl == nullptr || impl->dtype() != caffe2::TypeMeta::Make<int64_t>() || !impl->is_cpu() ||
      impl->layout() != c10::kStrided || impl->has_symbolic_sizes_strides() ||
      !impl->is_contiguous() || impl->numel() == 0) {
    return nullptr;
  }
  return static_cast<int64_t*>(const_cast<at::TensorImpl*>(impl)->mutable_data());
}

int64_t count_of(PyObject* object) { return plain(object)->numel(); }

// common(tensors[, positions]) -> the integer that all elements equal, or None if they differ; False if
// a tensor is not a plain contiguous tensor of integers
PyObject* common(PyObject*, PyObject* const* args, Py_ssize_t count) {
  const char* error = "common() takes a list of tensors, and perhaps one of positions; not none";
  Some some;
  if (!some.read(args, count, error)) {
    return nullptr;
  }
  if (some.size == 0) {
    PyErr_SetString(PyExc_TypeError, error);
    return nullptr;
  }
  try {
    bool same = true;
    int64_t first = 0;
    for (Py_ssize_t i = 0; i < some.size; ++i) {
      fetch_ahead(some.list, some.places[i], PyList_GET_SIZE(some.list));
      const int64_t* numbers = numbers_of(some[i]);
      if (numbers == nullptr) {
        Py_RETURN_FALSE;
      }
      first = i == 0 ? *numbers : first;
      for (int64_t k = 0; same && k < count_of(some[i]); ++k) {
        same = numbers[k] == first;
      }
    }
    if (same) {
      return PyLong_FromLongLong(first);
    }
  } catch (const std::exception&) {
    Py_RETURN_FALSE;
  }
  Py_RETURN_NONE;
}

// advance_each(tensors[, positions]) -> True if one was added to every integer of every tensor; False if
// nothing changed
PyObject* advance_each(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Some some;
  if (!some.read(args, count, "advance_each() takes a list of tensors, and perhaps one of positions")) {
    return nullptr;
  }
  try {
    for (Py_ssize_t i = 0; i < some.size; ++i) {
      if (numbers_of(some[i]) == nullptr) {
        Py_RETURN_FALSE;
      }
    }
    for (Py_ssize_t i = 0; i < some.size; ++i) {
      THPVariable_Unpack(some[i]).unsafeGetTensorImpl()->bump_version();
      int64_t* numbers = numbers_of(some[i]);
      for (int64_t k = 0; k < count_of(some[i]); ++k) {
        ++numbers[k];
      }
    }
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_TRUE;
}

// entries(state, params) -> the keys of the state dicts of params, with None after each dict, and their
// values, each as a list; None if the state has other keys than params, or another order
PyObject* entries(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyDict_Check(args[0]) || !PyList_CheckExact(args[1])) {
    PyErr_SetString(PyExc_TypeError, "entries() takes a dict and a list of its keys");
    return nullptr;
  }
  if (PyDict_GET_SIZE(args[0]) != PyList_GET_SIZE(args[1])) {
    Py_RETURN_NONE;
  }
  Py_ssize_t size = 0, place = 0;
  PyObject *key, *own;
  for (Py_ssize_t i = 0; PyDict_Next(args[0], &place, &key, &own); ++i) {
    if (key != PyList_GET_ITEM(args[1], i) || !PyDict_CheckExact(own)) {
      Py_RETURN_NONE;
    }
    size += PyDict_GET_SIZE(own);
  }
  const Py_ssize_t count_of_dicts = PyDict_GET_SIZE(args[0]);
  PyObject* keys = PyList_New(size + count_of_dicts);
  PyObject* values = keys == nullptr ? nullptr : PyList_New(size);
  Py_ssize_t k = 0, ends = 0;
  for (place = 0; values != nullptr && ends < count_of_dicts && PyDict_Next(args[0], &place, &key, &own);
       ++ends) {
    PyObject* value;
    for (Py_ssize_t at = 0; k < size && PyDict_Next(own, &at, &key, &value); ++k) {
      PyList_SET_ITEM(keys, k + ends, Py_NewRef(key));
      PyList_SET_ITEM(values, k, Py_NewRef(value));
    }
    PyList_SET_ITEM(keys, k + ends, Py_NewRef(Py_None));
  }
  // A new list may start the garbage collector, which may change dicts.
  if (values == nullptr || k < size || ends < count_of_dicts) {
    Py_XDECREF(keys);
    Py_XDECREF(values);
    if (PyErr_Occurred() != nullptr) {
      return nullptr;
    }
    Py_RETURN_NONE;
  }
  return Py_BuildValue("(NN)", keys, values);
}

// mask(list) -> a byte for each element, 0 for None; None if no element is None
PyObject* mask(PyObject*, PyObject* list) {
  if (!PyList_CheckExact(list)) {
    PyErr_SetString(PyExc_TypeError, "mask() takes a list");
    return nullptr;
  }
  const Py_ssize_t length = PyList_GET_SIZE(list);
  Py_ssize_t first = 0;
  while (first < length && PyList_GET_ITEM(list, first) != Py_None) {
    ++first;
  }
  if (first == length) {
    Py_RETURN_NONE;
  }
  PyObject* found = PyBytes_FromStringAndSize(nullptr, length);
  for (Py_ssize_t i = 0; found != nullptr && i < length; ++i) {
    PyBytes_AS_STRING(found)[i] = PyList_GET_ITEM(list, i) != Py_None;
  }
  return found;
}

// Method that takes its arguments as an array.
PyMethodDef fast(const char* name, PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), METH_FASTCALL, nullptr};
}

PyMethodDef methods[] = {
    {"grads", grads, METH_O, nullptr},
    {"layouts", layouts, METH_O, nullptr},
    {"mask", mask, METH_O, nullptr},
    {"walk", walk, METH_O, nullptr},
    fast("hold", hold),
    fast("bump", bump),
    fast("advance_each", advance_each),
    fast("common", common),
    fast("entries", entries),
    fast("lay_out", lay_out),
    fast("locate", locate),
    fast("norms", norms),
    fast("squares", squares),
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "loops", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_loops() { return PyModule_Create(&module); }
