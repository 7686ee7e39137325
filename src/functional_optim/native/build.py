"""Build recipe of the C++ loops, and the loader of the compiled module."""

import sys
import sysconfig
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch

from functional_optim.native.cache import BuildRecipe, default_compiler, no_compiler_reason

SOURCE = Path(__file__).parent / "loops.cpp"
_ROOT = Path(torch.__file__).parent
_VARIABLE = _ROOT / "include" / "torch" / "csrc" / "autograd" / "python_variable.h"
"""torch's header that declares Python's tensors in C++."""
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
"""The name of the module; no other module has it."""


def recipe() -> BuildRecipe:
    """Return the source and the flags of the loops."""
    text = f"// Python {sys.version.splitlines()[0]}\n{_inline_includes(SOURCE, set())}"
    include, library = _ROOT / "include", _ROOT / "lib"
    flags = [
        *_flags(),
        *(() if _header_matches(_VARIABLE) else ("-DWHOLE_HEADER",)),
        *("-I", sysconfig.get_path("include")),
        *("-isystem", str(include)),
        *("-isystem", str(include / "torch" / "csrc" / "api" / "include")),
        *("-L", str(library), "-ltorch_python", "-ltorch_cpu", "-lc10"),
    ]
    return BuildRecipe(text, tuple(flags), default_compiler())


def _header_matches(header: Path) -> bool:
    """Return True if a header of torch has the declarations that ``variable.hpp`` repeats.

    Otherwise the whole header is compiled, which takes 15 seconds of a processor instead of 3.
    """
    try:
        lines = [line.partition("//")[0] for line in header.read_text().splitlines()]
    except OSError:
        return False
    text = " ".join(" ".join(lines).split()).replace("( ", "(")
    return all(one in text for one in _DECLARED)


def _inline_includes(path: Path, known: set[str]) -> str:
    """Return a source with its local includes inlined, each once. The cache key covers them."""
    lines = []
    for line in path.read_text().splitlines():
        if line.startswith('#include "'):
            name = line.split('"')[1]
            if name not in known:
                known.add(name)
                lines.append(_inline_includes(path.with_name(name), known))
        elif line != "#pragma once":
            lines.append(line)
    return "\n".join(lines) + "\n"


def _flags() -> list[str]:
    """Return the flags that decide the compiled code."""
    flags = ["-std=c++20", "-O2", "-fPIC", "-pthread", "-shared", "-w"]
    if sys.platform == "darwin":
        flags += ["-undefined", "dynamic_lookup"]
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        flags += ["-mavx2", "-ffp-contract=off"]  # four doubles at a time, without fused rounding
    return flags


def thread_flags() -> tuple[str, ...]:
    """Return the flags by which a library uses torch's threads.

    GCC's OpenMP library is loaded already if torch contains it. Any other library would start
    threads in addition to torch's. Without these flags, one thread computes.
    """
    has_gomp = (_ROOT / "lib" / "libgomp.so.1").exists()
    return ("-fopenmp",) if has_gomp and "clang" not in Path(default_compiler()[0]).name else ()


def no_build_reason() -> str:
    """Return why the loops cannot be compiled on this machine; empty if they can."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return no_compiler_reason("cpu") or ("" if headers.exists() else f"there is no {headers}")


def load_module(path: str) -> ModuleType:
    """Load the module in a library.

    The module is not in ``sys.modules``, and has no ``__file__``, because its path is invalid after
    the load. Tools that read the files of all modules, such as Hypothesis, would read whatever is
    at that path, and would hang on a pipe.
    """
    loader = ExtensionFileLoader(NAME, path)
    spec = spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    sys.modules.pop(NAME, None)  # where the interpreter has entered it
    del module.__file__
    return module
