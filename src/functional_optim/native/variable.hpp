// Python's tensors in C++.

#pragma once

#include <Python.h>

#ifdef WHOLE_HEADER

#include <torch/csrc/autograd/python_variable.h>

#else

// The declarations of <torch/csrc/autograd/python_variable.h> that these loops use. With the whole
// header, including pybind11, the compiler takes eight times as long. build.py compares these
// declarations with the header of the installed torch.

#include <ATen/core/Tensor.h>

struct THPVariable {
  PyObject_HEAD
  at::Tensor cdata;
};

extern PyObject* THPVariableClass;
extern PyObject* ParameterClass;

PyObject* THPVariable_Wrap(const at::TensorBase& var);

inline bool THPVariable_CheckExact(PyObject* obj) {
  return Py_TYPE(obj) == reinterpret_cast<PyTypeObject*>(THPVariableClass) ||
      Py_TYPE(obj) == reinterpret_cast<PyTypeObject*>(ParameterClass);
}

inline bool THPVariable_Check(PyObject* obj) {
  return THPVariable_CheckExact(obj) || PyObject_IsInstance(obj, THPVariableClass) == 1;
}

inline const at::Tensor& THPVariable_Unpack(PyObject* obj) {
  return reinterpret_cast<THPVariable*>(obj)->cdata;
}

#endif
