"""Table of the functions of Intel's vector library that a loop calls, as torch's operations do."""

import ctypes
from functools import lru_cache
from pathlib import Path

import torch

from functional_optim.kernels.exact.roots import roots_like

MODE = 0x2 | 0x140000 | 0x100
"""Mode in which torch calls the functions: high accuracy, denormals kept, errors ignored."""

_PREFIX = {torch.float32: "vms", torch.float64: "vmd"}


class _Table(ctypes.Structure):
    """Start of the table that a loop gets. The addresses of its functions follow, in its order."""

    _fields_ = (("mode", ctypes.c_longlong), ("threads", ctypes.c_void_p))


@lru_cache(maxsize=1)
def _torch_library() -> ctypes.CDLL | None:
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        if (folder / name).exists():
            return ctypes.CDLL(str(folder / name))
    return None


def _function(name: str) -> int | None:
    """Return the address of a function in torch's library; None if torch is built without it."""
    library = _torch_library()
    if library is None or not hasattr(library, name):
        return None
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


def has_library() -> bool:
    """Return True if torch is built with Intel's library."""
    return _function("vmsSqrt") is not None


def _taken(name: str, dtype: torch.dtype) -> int | None:
    """Return the address of the library's function, or of a faster function with the same bits."""
    found = _function(_PREFIX[dtype] + name)
    if found is not None and (name, dtype) == ("Sqrt", torch.float32):
        return roots_like(found, MODE) or found
    return found


@lru_cache(maxsize=64)
def table(names: tuple[str, ...], dtype: torch.dtype) -> "ctypes.Array[ctypes.c_void_p] | None":
    """Return the table of functions for a loop; None if torch lacks one of them."""
    found = [_taken(name, dtype) for name in names]
    if None in found:
        return None
    # The library could start its own threads at every call, so the loop sets it to one thread.
    threads = _function("MKL_Set_Num_Threads_Local") if names else None
    made = (ctypes.c_void_p * (2 + len(names)))(MODE, threads, *found)
    assert ctypes.sizeof(_Table) == 2 * ctypes.sizeof(ctypes.c_void_p)
    return made
