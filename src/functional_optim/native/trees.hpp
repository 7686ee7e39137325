// Trees of tensors: flattened, and located in memory.

#pragma once

#include <Python.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "sources.hpp"

namespace {

// Append the tensors of a tree to one list and its form to another. Return false if the tree has
// anything but plain tensors, None, tuples and lists.
bool walk_into(PyObject* one, PyObject* tensors, PyObject* form) {
  if (THPVariable_CheckExact(one)) {
    return PyList_Append(tensors, one) == 0 && PyList_Append(form, Py_True) == 0;
  }
  if (one == Py_None) {
    return PyList_Append(form, Py_None) == 0;
  }
  if ((!PyTuple_Check(one) && !PyList_CheckExact(one)) || Py_EnterRecursiveCall(" in walk()") != 0) {
    return false;
  }
  PyObject* size = PyLong_FromSsize_t(PySequence_Fast_GET_SIZE(one));
  bool fits = size != nullptr && PyList_Append(form, size) == 0 &&
      PyList_Append(form, reinterpret_cast<PyObject*>(Py_TYPE(one))) == 0;
  Py_XDECREF(size);
  for (Py_ssize_t i = 0; fits && i < PySequence_Fast_GET_SIZE(one); ++i) {
    fits = walk_into(PySequence_Fast_GET_ITEM(one, i), tensors, form);
  }
  Py_LeaveRecursiveCall();
  return fits;
}

// Return true if a step may write to a tensor: it has no grad_fn, and it has a version counter.
bool is_writable(PyObject* object) {
  return !THPVariable_Unpack(object).is_inference() && is_leaf(object);
}

// Return true if no written tensor shares memory with any other tensor. Only tensors that moved since
// the last call are compared; `now` becomes the addresses of the last call.
bool are_disjoint(Places& layout, std::vector<const char*>& now) {
  bool has_read_moved = false, has_written_moved = layout.last.empty();
  for (size_t i = 0; i < now.size() && !has_written_moved; ++i) {
    const bool has_moved = now[i] != layout.last[i];
    has_written_moved = has_moved && layout.written[i];
    has_read_moved = has_read_moved || has_moved;
  }
  const auto& traits = layout.traits;
  if (has_written_moved) {
    layout.last.clear();
    layout.closed.clear();
    for (size_t i = 0; i < now.size(); ++i) {
      if (layout.written[i] && traits[i].bytes > 0) {
        layout.closed.push_back({now[i], now[i] + traits[i].bytes});
      }
    }
    std::sort(layout.closed.begin(), layout.closed.end(),
              [](const Span& one, const Span& other) { return one.begin < other.begin; });
    for (size_t k = 1; k < layout.closed.size(); ++k) {
      if (layout.closed[k].begin < layout.closed[k - 1].end) {
        return false;
      }
    }
  }
  if (has_written_moved || has_read_moved) {
    for (size_t i = 0; i < now.size(); ++i) {
      if (!layout.written[i] && traits[i].bytes > 0 &&
          among(layout.closed, {now[i], traits[i].bytes})) {
        return false;
      }
    }
  }
  layout.last.swap(now);
  return true;
}

// walk(tree) -> (tensors, form): the tensors of a tree, and a list of everything else; None if the tree
// has anything but plain tensors, None, tuples and lists
PyObject* walk(PyObject*, PyObject* tree) {
  PyObject* tensors = PyList_New(0);
  PyObject* form = PyList_New(0);
  PyObject* found = nullptr;
  if (tensors != nullptr && form != nullptr && walk_into(tree, tensors, form)) {
    found = PyTuple_Pack(2, tensors, form);
  }
  Py_XDECREF(tensors);
  Py_XDECREF(form);
  if (found == nullptr) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  return found;
}

// lay_out(tensors, written, slots) -> layout; None if a tensor is not plain and strided
PyObject* lay_out(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3 || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1]) ||
      !PyList_CheckExact(args[2]) || PyList_GET_SIZE(args[0]) != PyList_GET_SIZE(args[1]) ||
      PyList_GET_SIZE(args[0]) != PyList_GET_SIZE(args[2])) {
    PyErr_SetString(PyExc_TypeError, "lay_out() takes three lists of one length");
    return nullptr;
  }
  auto layout = std::make_unique<Places>();
  if (!record_in(args[0], *layout)) {
    Py_RETURN_NONE;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
    const Py_ssize_t slot = PyLong_AsSsize_t(PyList_GET_ITEM(args[2], i));
    if (slot == -1 && PyErr_Occurred() != nullptr) {
      return nullptr;
    }
    layout->writable.push_back(PyList_GET_ITEM(args[1], i) != Py_False);
    layout->written.push_back(PyList_GET_ITEM(args[1], i) == Py_True);
    layout->slots.push_back(slot);
    layout->pointers += slot >= 0;
  }
  std::vector<char> filled(layout->pointers);
  for (const Py_ssize_t slot : layout->slots) {
    if (slot >= layout->pointers || (slot >= 0 && filled[slot]++)) {
      PyErr_SetString(PyExc_ValueError, "lay_out() takes slots 0, 1, 2 and so on, each once");
      return nullptr;
    }
  }
  return PyCapsule_New(layout.release(), kName, destroy);
}

// locate(layout, tensors) -> bytes: the pointer of each tensor with a slot; None if a tensor has
// another layout, may not be written to, or shares memory with a written tensor.
PyObject* locate(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyList_CheckExact(args[1])) {
    PyErr_SetString(PyExc_TypeError, "locate() takes a layout and a list of tensors");
    return nullptr;
  }
  Places* layout = places_in(args[0]);
  if (layout == nullptr) {
    return nullptr;
  }
  const Py_ssize_t length = PyList_GET_SIZE(args[1]);
  if (!layout->dense || static_cast<size_t>(length) != layout->slots.size()) {
    Py_RETURN_NONE;
  }
  PyObject* found = PyBytes_FromStringAndSize(nullptr, layout->pointers * sizeof(char*));
  if (found == nullptr) {
    return nullptr;
  }
  const char** table = reinterpret_cast<const char**>(PyBytes_AS_STRING(found));
  try {
    std::vector<const char*> now(length);
    Py_ssize_t i = 0;
    for (Source one; i < length && find_source(args[1], i, length, *layout, one) &&
         (!layout->writable[i] || is_writable(PyList_GET_ITEM(args[1], i))); ++i) {
      now[i] = one.from;
      if (layout->slots[i] >= 0) {
        table[layout->slots[i]] = one.from;
      }
    }
    if (i == length && are_disjoint(*layout, now)) {
      return found;
    }
  } catch (const std::exception&) {
    // return None
  }
  Py_DECREF(found);
  Py_RETURN_NONE;
}

}  // namespace
