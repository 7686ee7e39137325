"""The recipe of the loops in C++, and how they are loaded."""

import sys
import sysconfig
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch

from functional_optim.native.cache import BuildRecipe, default_compiler, no_compiler

SOURCE = Path(__file__).parent / "loops.cpp"
_ROOT = Path(torch.__file__).parent
_VARIABLE = _ROOT / "include" / "torch" / "csrc" / "autograd" / "python_variable.h"
"""torch's header of what Python's tensors are in C++."""
_DECLARED = (
    "struct THPVariable { PyObject_HEAD at::Tensor cdata;",
    "TORCH_PYTHON_API extern PyObject* THPVariableClass;",
    "TORCH_PYTHON_API extern PyObject* ParameterClass;",
    "TORCH_PYTHON_API PyObject* THPVariable_Wrap(const at::TensorBase& var);",
    "(tp == (PyTypeObject*)THPVariableClass || tp == (PyTypeObject*)ParameterClass)",
    "THPVariable_Unpack(THPVariable* var) { return var->cdata; }",
)
"""Declarations of that header that ``variable.hpp`` repeats."""
NAME = "functional_optim.native.loops"
"""Of the module: nobody else has one of this name."""


def recipe() -> BuildRecipe:
    """Return the source and the flags of the loops."""
    text = f"// Python {sys.version.splitlines()[0]}\n{_expanded(SOURCE, set())}"
    include, library = _ROOT / "include", _ROOT / "lib"
    flags = [
        *_flags(),
        *(() if _declares_the_same(_VARIABLE) else ("-DWHOLE_HEADER",)),
        *("-I", sysconfig.get_path("include")),
        *("-isystem", str(include)),
        *("-isystem", str(include / "torch" / "csrc" / "api" / "include")),
        *("-L", str(library), "-ltorch_python", "-ltorch_cpu", "-lc10"),
    ]
    return BuildRecipe(text, tuple(flags), default_compiler())


def _declares_the_same(header: Path) -> bool:
    """Return True if a header of torch has what ``variable.hpp`` repeats of it.

    Else the header itself is compiled, which takes fifteen seconds of a processor, not three.
    """
    try:
        lines = [line.partition("//")[0] for line in header.read_text().splitlines()]
    except OSError:
        return False
    text = " ".join(" ".join(lines).split()).replace("( ", "(")
    return all(one in text for one in _DECLARED)


def _expanded(path: Path, known: set[str]) -> str:
    """A text with the files beside it that it includes, each once: one source, known whole."""
    lines = []
    for line in path.read_text().splitlines():
        if line.startswith('#include "'):
            name = line.split('"')[1]
            if name not in known:
                known.add(name)
                lines.append(_expanded(path.with_name(name), known))
        elif line != "#pragma once":
            lines.append(line)
    return "\n".join(lines) + "\n"


def _flags() -> list[str]:
    """Return the flags that decide the compiled code."""
    flags = ["-std=c++20", "-O2", "-fPIC", "-pthread", "-shared", "-w"]
    if sys.platform == "darwin":
        flags += ["-undefined", "dynamic_lookup"]
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        flags += ["-mavx2", "-ffp-contract=off"]  # four numbers of double precision at a time
    return flags


def thread_flags() -> tuple[str, ...]:
    """Return the flags by which a library computes in torch's threads.

    GCC's library of threads is loaded already, where torch brings it along under its own name. Any
    other would start threads beside torch's; without, one thread computes.
    """
    brings_it = (_ROOT / "lib" / "libgomp.so.1").exists()
    return ("-fopenmp",) if brings_it and "clang" not in Path(default_compiler()[0]).name else ()


def nothing_compiles() -> str:
    """Return why the loops cannot be compiled on this machine; empty if they can."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return no_compiler("cpu") or ("" if headers.exists() else f"there is no {headers}")


def load_module(path: str) -> ModuleType:
    """The loops in a library.

    They are no module that can be imported, and say of no file that they are from it: what was at
    this path is gone, and something else may be there. Tools that read the files of all modules, as
    Hypothesis does, would read that, and wait for ever where it is a pipe.

    Raises:
        OSError, ImportError: it does not load.
    """
    loader = ExtensionFileLoader(NAME, path)
    spec = spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    sys.modules.pop(NAME, None)  # where the interpreter has entered it
    del module.__file__
    return module
