"""The floor: a loop in C, compiled on the spot, with the least memory traffic possible."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.errors import Absent

SOURCE = Path(__file__).with_name("floor.c")
# sqrtf may then be a vector instruction, and a comparison need not trap on NaN.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The compiled loops.

    Raises:
        Absent: there is no C compiler with OpenMP.
    """
    # torch's OpenMP is loaded already, and the same name resolves to it: one pool of threads for
    # all contestants. Two would wait for work on each other's cores.
    torch.get_num_threads()
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise Absent("no C compiler: install gcc, or name one in the environment variable CC")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "floor.so"
        command = [compiler, *FLAGS, "-shared", "-fPIC", str(SOURCE), "-o", str(built), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Absent(f"{compiler} cannot compile {SOURCE.name}: {done.stderr.strip()[:300]}")
        return ctypes.CDLL(str(built))


class Floor:
    """A step over flat buffers.

    Args:
        kernel: the name of a loop in ``floor.c``.
        coefficients: step (from 1) -> what the loop takes in ``c``.
        varying: whether the coefficients change with the step.
        buffers: p, g, and as many state buffers as the loop has; float32, of one length.
        threads: how many threads share the loop.

    Raises:
        Absent: there is no C compiler with OpenMP.
    """

    def __init__(
        self,
        kernel: str,
        coefficients: Callable[[int], Sequence[float]],
        buffers: Sequence[Tensor],
        threads: int,
        *,
        varying: bool,
    ) -> None:
        self._function = getattr(library(), kernel)
        self._function.restype = None
        self._coefficients = coefficients
        self._varying = varying
        self._buffers = tuple(buffers)  # kept alive: C holds their addresses only
        first = coefficients(1)
        self._c = (ctypes.c_float * len(first))(*first)
        addresses = [ctypes.c_void_p(buffer.data_ptr()) for buffer in buffers]
        addresses += [ctypes.c_void_p(None)] * (4 - len(addresses))
        numel = ctypes.c_int64(buffers[0].numel())
        self._arguments = (*addresses, self._c, numel, ctypes.c_int(threads))
        self._made = 0

    def __call__(self) -> None:
        """One step."""
        self._made += 1
        if self._varying:
            self._c[:] = list(self._coefficients(self._made))
        self._function(*self._arguments)
