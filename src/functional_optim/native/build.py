"""The compiler's command for ``loops.cpp``, and the file that it makes."""

import hashlib
import json
import os
import platform
import shlex
import sys
import sysconfig
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch

from functional_optim.executors.cache_entry import BrokenEntryError, is_there
from functional_optim.executors.compiler import no_compiler

SOURCE = Path(__file__).parent / "loops.cpp"
_HEADERS = ("copying.hpp", "places.hpp", "sources.hpp", "threads.hpp")
_TEXTS = (SOURCE, *(SOURCE.with_name(name) for name in _HEADERS))
_ROOT = Path(torch.__file__).parent
NAME = "functional_optim.native.loops"
"""Of the module: nobody else has one of this name."""


def command(target: Path) -> list[str]:
    """What compiles the loops into ``target``."""
    include, library = _ROOT / "include", _ROOT / "lib"
    return [
        *_compiler(),
        *_flags(),
        *("-I", sysconfig.get_path("include")),
        *(
            "-isystem",
            str(include),
            "-isystem",
            str(include / "torch" / "csrc" / "api" / "include"),
        ),
        *(str(SOURCE), "-o", str(target)),
        *("-L", str(library), "-ltorch_python", "-ltorch_cpu", "-lc10"),
    ]


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "g++")


def _flags() -> list[str]:
    """What decides what is made of the source."""
    flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-w"]
    if sys.platform == "darwin":
        flags += ["-undefined", "dynamic_lookup"]
    # GCC's library of threads is loaded already, where torch brings it along under its own name.
    # Any other would start threads beside torch's; without, one thread copies.
    brings_it = (_ROOT / "lib" / "libgomp.so.1").exists()
    if brings_it and "clang" not in Path(_compiler()[0]).name:
        flags.append("-fopenmp")
    return flags


def nothing_compiles() -> str:
    """Why nothing can compile the loops on this machine; empty if something can."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return no_compiler("cpu") or ("" if headers.exists() else f"there is no {headers}")


def key() -> str:
    """A name for the file: equal for equal sources on equal machines."""
    facts = [
        *(one.read_text() for one in _TEXTS),
        torch.__version__,
        sys.version,
        platform.machine(),
        os.environ.get("CXX", ""),
        *_flags(),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40]


def files(folder: Path) -> tuple[Path, Path]:
    """The library, and the facts by which it is checked."""
    name = f"loops-{key()}"
    return folder / f"{name}.so", folder / f"{name}.json"


def load(folder: Path) -> ModuleType | None:
    """The loops from disk; None if they are not there.

    Raises:
        BrokenEntryError: what is there is not what was written, or does not load.
    """
    library, facts = files(folder)
    if not is_there(library, facts):
        return None
    try:
        loader = ExtensionFileLoader(NAME, str(library))
        spec = spec_from_file_location(NAME, library, loader=loader)
        assert spec is not None
        module = module_from_spec(spec)
        loader.exec_module(module)
    except (OSError, ImportError) as error:
        raise BrokenEntryError(f"{library}: {error}") from error
    return module
