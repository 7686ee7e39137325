// Loops over lists of tensors, each some nanoseconds per tensor where Python takes a tenth of a
// microsecond and more. They answer for plain dense tensors only; of anything else they say that
// they cannot tell, and Python looks at it.

#include <Python.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "places.hpp"
#include "sources.hpp"
#include "trees.hpp"

namespace {

// remember(tensors) -> places; None where one of them is no plain dense tensor
PyObject* remember(PyObject*, PyObject* list) {
  if (!PyList_CheckExact(list)) {
    PyErr_SetString(PyExc_TypeError, "remember() takes a list of tensors");
    return nullptr;
  }
  auto places = std::make_unique<Places>();
  if (!remember_in(list, *places)) {
    Py_RETURN_NONE;
  }
  return PyCapsule_New(places.release(), kName, destroy);
}

// hold(places, tensors, where) -> whether the tensors are like those that are remembered, and, if
// `where` is true, lie where they lay
PyObject* hold(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3 || !PyList_CheckExact(args[1])) {
    PyErr_SetString(PyExc_TypeError, "hold() takes places, a list of tensors, and a bool");
    return nullptr;
  }
  const Places* places = places_in(args[0]);
  if (places == nullptr) {
    return nullptr;
  }
  PyObject* list = args[1];
  const bool where = args[2] == Py_True;
  const Py_ssize_t length = PyList_GET_SIZE(list);
  if (static_cast<size_t>(length) != places->traits.size()) {
    Py_RETURN_FALSE;
  }
  try {
    for (Py_ssize_t i = 0; i < length; ++i) {
      fetch_ahead(list, i, length);
      const Trait& trait = places->traits[i];
      const at::TensorImpl* impl = plain(PyList_GET_ITEM(list, i));
      if (impl == nullptr || !alike(impl, trait, places->dims.data() + trait.dims) ||
          (where && (address_of(impl) != trait.address ||
                     impl->unsafe_storage().nbytes() != trait.storage))) {
        Py_RETURN_FALSE;
      }
    }
  } catch (const std::exception&) {
    Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

// bump(tensors): tell autograd that they were written to
PyObject* bump(PyObject*, PyObject* list) {
  if (!PyList_CheckExact(list)) {
    PyErr_SetString(PyExc_TypeError, "bump() takes a list of tensors");
    return nullptr;
  }
  const Py_ssize_t length = PyList_GET_SIZE(list);
  try {
    Py_ssize_t i = 0;
    for (; i < length && THPVariable_Check(PyList_GET_ITEM(list, i)); ++i) {
      fetch_ahead(list, i, length, true);
      THPVariable_Unpack(PyList_GET_ITEM(list, i)).unsafeGetTensorImpl()->bump_version();
    }
    if (i == length) {
      Py_RETURN_NONE;
    }
  } catch (const std::exception&) {
    // as below
  }
  PyErr_SetString(PyExc_TypeError, "bump() takes tensors that were not made in inference mode");
  return nullptr;
}

// grads(tensors) -> their gradients, or None for each; None in place of all where Python has to ask
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
        Py_RETURN_NONE;  // torch warns of it
      }
      PyObject* one = THPVariable_Wrap(grad);  // None where there is none
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

// The whole numbers that a contiguous tensor holds; null where it is no such tensor.
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

// common(counts) -> the whole number that all of these tensors hold, None where they differ; False
// where one of them is no plain contiguous tensor of such numbers
PyObject* common(PyObject*, PyObject* list) {
  if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) == 0) {
    PyErr_SetString(PyExc_TypeError, "common() takes a list of tensors");
    return nullptr;
  }
  try {
    bool same = true;
    int64_t first = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
      const int64_t* numbers = numbers_of(PyList_GET_ITEM(list, i));
      if (numbers == nullptr) {
        Py_RETURN_FALSE;
      }
      first = i == 0 ? *numbers : first;
      for (int64_t k = 0; same && k < count_of(PyList_GET_ITEM(list, i)); ++k) {
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

// advance_each(counts) -> whether one was added to each whole number that each of these tensors holds;
// if not, to none
PyObject* advance_each(PyObject*, PyObject* list) {
  if (!PyList_CheckExact(list)) {
    PyErr_SetString(PyExc_TypeError, "advance_each() takes a list of tensors");
    return nullptr;
  }
  const Py_ssize_t length = PyList_GET_SIZE(list);
  try {
    for (Py_ssize_t i = 0; i < length; ++i) {
      if (numbers_of(PyList_GET_ITEM(list, i)) == nullptr) {
        Py_RETURN_FALSE;
      }
    }
    for (Py_ssize_t i = 0; i < length; ++i) {
      PyObject* object = PyList_GET_ITEM(list, i);
      THPVariable_Unpack(object).unsafeGetTensorImpl()->bump_version();
      int64_t* numbers = numbers_of(object);
      for (int64_t k = 0; k < count_of(object); ++k) {
        ++numbers[k];
      }
    }
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_TRUE;
}

void copy_without_gil(const std::vector<Copy>& copies) {
  Py_BEGIN_ALLOW_THREADS
  for (size_t i = 0; i < copies.size(); ++i) {
    if (i + 2 < copies.size()) {
      __builtin_prefetch(copies[i + 2].from);
    }
    if (copies[i].bytes != 0) {
      std::memcpy(copies[i].to, copies[i].from, copies[i].bytes);
    }
  }
  Py_END_ALLOW_THREADS
}

PyObject* error_or_false() {
  if (PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  Py_RETURN_FALSE;
}

// copy(places, tensors) -> whether the tensors were copied to the places; if not, nothing was: they are
// not alike, or lie among the places themselves
PyObject* copy(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyList_CheckExact(args[1])) {
    PyErr_SetString(PyExc_TypeError, "copy() takes places and a list of tensors");
    return nullptr;
  }
  PyObject* list = args[1];
  const Places* places = places_for(args[0], list, true);
  if (places == nullptr) {
    return error_or_false();
  }
  const Py_ssize_t length = PyList_GET_SIZE(list);
  try {
    std::vector<Copy> copies(length);
    for (Py_ssize_t i = 0; i < length; ++i) {
      if (!find_source(list, i, length, *places, copies[i]) || among(places->spans, copies[i])) {
        Py_RETURN_FALSE;
      }
      copies[i].to = const_cast<char*>(places->traits[i].address);
    }
    copy_without_gil(copies);
  } catch (const std::exception&) {
    Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

// entries(dicts) -> the keys of all dicts, and their values, each as a list
PyObject* entries(PyObject*, PyObject* list) {
  if (!PyList_CheckExact(list)) {
    PyErr_SetString(PyExc_TypeError, "entries() takes a list of dicts");
    return nullptr;
  }
  const Py_ssize_t length = PyList_GET_SIZE(list);
  Py_ssize_t size = 0;
  for (Py_ssize_t i = 0; i < length; ++i) {
    if (!PyDict_CheckExact(PyList_GET_ITEM(list, i))) {
      PyErr_SetString(PyExc_TypeError, "entries() takes a list of dicts");
      return nullptr;
    }
    size += PyDict_GET_SIZE(PyList_GET_ITEM(list, i));
  }
  PyObject* keys = PyList_New(size);
  PyObject* values = keys == nullptr ? nullptr : PyList_New(size);
  if (values == nullptr) {
    Py_XDECREF(keys);
    return nullptr;
  }
  Py_ssize_t k = 0;
  for (Py_ssize_t i = 0; i < length; ++i) {
    PyObject *key, *value;
    Py_ssize_t place = 0;
    while (k < size && PyDict_Next(PyList_GET_ITEM(list, i), &place, &key, &value)) {
      PyList_SET_ITEM(keys, k, Py_NewRef(key));
      PyList_SET_ITEM(values, k, Py_NewRef(value));
      ++k;
    }
  }
  return Py_BuildValue("(NN)", keys, values);
}

PyMethodDef methods[] = {
    {"remember", remember, METH_O, nullptr},
    {"entries", entries, METH_O, nullptr},
    {"hold", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(hold)), METH_FASTCALL, nullptr},
    {"bump", bump, METH_O, nullptr},
    {"grads", grads, METH_O, nullptr},
    {"advance_each", advance_each, METH_O, nullptr},
    {"common", common, METH_O, nullptr},
    {"copy", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(copy)), METH_FASTCALL, nullptr},
    {"walk", walk, METH_O, nullptr},
    {"lay_out", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(lay_out)), METH_FASTCALL,
     nullptr},
    {"locate", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(locate)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "loops", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_loops() { return PyModule_Create(&module); }
