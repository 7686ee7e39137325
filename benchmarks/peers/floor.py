"""The floor: a loop in C with the least possible memory traffic, compiled at run time."""

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
# The flags allow vector instructions for sqrtf, and comparisons that do not trap on NaN.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Return the compiled loops.

    Raises:
        Absent: there is no C compiler with OpenMP.
    """
    # The name resolves to torch's OpenMP, which is already loaded, so all contestants share one
    # pool of threads. The threads of two pools would compete for the same cores.
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
    """Step over flat buffers.

    Args:
        kernel: the name of a loop in ``floor.c``.
        coefficients: function from the step (from 1) to the argument ``c`` of the loop.
        varying: True if the coefficients change with the step.
        buffers: p, g, and as many state buffers as the loop has; float32, of one length.
        threads: the number of threads that share the loop.

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
        self._buffers = tuple(buffers)  # kept alive: C holds only their addresses
        first = coefficients(1)
        self._c = (ctypes.c_float * len(first))(*first)
        addresses = [ctypes.c_void_p(buffer.data_ptr()) for buffer in buffers]
        addresses += [ctypes.c_void_p(None)] * (4 - len(addresses))
        numel = ctypes.c_int64(buffers[0].numel())
        self._arguments = (*addresses, self._c, numel, ctypes.c_int(threads))
        self._made = 0

    def __call__(self) -> None:
        """Make one step."""
        self._made += 1
        if self._varying:
            self._c[:] = list(self._coefficients(self._made))
        self._function(*self._arguments)
