"""A compiled step, loaded: called without the GIL where that is worth it."""

import ctypes
import os
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional_optim.executors.cache_entry import BrokenEntryError, is_there
from functional_optim.executors.compile_request import Request, entry_files

LONG = 1 << 15
"""Elements from which a call lets go of the GIL, which costs some 20 microseconds."""


class CompiledStep:
    """``step(tensors, uniform)`` steps a lane in place.

    Args:
        path: of the shared library, or package, that was compiled.
        request: what it was compiled for.

    Raises:
        BrokenEntryError: it does not load.
    """

    def __init__(self, path: Path, request: Request) -> None:
        self.request = request
        self._inputs = request.inputs
        self._dtypes = [getattr(torch, name) for name, _ in request.inputs]
        try:
            if request.device == "cpu":
                self._runner: Any = torch._C._aoti.AOTIModelContainerRunnerCpu(  # noqa: SLF001  torch has no public name
                    str(path), os.cpu_count() or 1
                )
                self._direct = _Direct(path, request)
            else:
                self._runner = _OnDevices(path)
        except (RuntimeError, OSError) as error:
            raise BrokenEntryError(str(error)) from error

    def load_on(self, device: torch.device) -> None:
        """Make sure that it runs on this device without loading anything first."""
        if isinstance(self._runner, _OnDevices):
            self._runner.load_on(device.index)

    def __call__(self, tensors: list[Tensor], uniform: Tensor) -> None:
        """One step.

        Raises:
            TypeError: tensors of other dtypes than it was compiled for; nothing is written.
            ValueError: a lane that is not made of whole units; nothing is written.
        """
        if [tensor.dtype for tensor in tensors] != self._dtypes:
            raise TypeError(
                f"this step was compiled for {self._dtypes}, got {[t.dtype for t in tensors]}"
            )
        count, unit = tensors[0].numel(), self.request.unit
        if count == 0 or count % unit:
            raise ValueError(
                f"this step was compiled for multiples of {unit} elements, got {count}"
            )
        if self.request.in_rows:
            each = [one for _, one in self._inputs]
            tensors = [
                tensor.view(-1, unit) if one == 1 else tensor
                for tensor, one in zip(tensors, each, strict=True)
            ]
        if self.request.device == "cpu" and count >= LONG:
            self._direct([*tensors, uniform])
        else:
            self._runner.run([*tensors, uniform])


class _OnDevices:
    """A package, loaded for each device of its kind that it is used on.

    It runs without torch's guards against several threads, since these query events, which cannot
    be done while a CUDA graph is captured; a lock stands in their place.
    """

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._loaded: dict[int, Any] = {}
        self._lock = threading.Lock()

    def load_on(self, index: int) -> Any:
        """What runs it on a device. Not loaded before it is asked for: that takes memory there."""
        if index not in self._loaded:
            with torch.cuda.device(index):
                self._loaded[index] = torch._C._aoti.AOTIModelPackageLoader(  # noqa: SLF001  torch has no public name
                    self._path, "model", True, 1, index
                )
        return self._loaded[index]

    def run(self, tensors: list[Tensor]) -> None:
        """One step, on the device of the tensors."""
        index = tensors[0].device.index
        with self._lock, torch.cuda.device(index):
            self.load_on(index).run(tensors)


class _Direct:
    """The library's C interface. Python's ``run`` holds the GIL; ctypes lets go of it."""

    def __init__(self, path: Path, request: Request) -> None:
        self._library = ctypes.CDLL(str(path))
        self._run = self._library.AOTInductorModelContainerRun
        pointer, handles = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
        self._run.argtypes = [
            pointer,
            handles,
            ctypes.c_size_t,
            handles,
            ctypes.c_size_t,
            pointer,
            pointer,
        ]
        self._container = ctypes.c_void_p()
        copies = ctypes.c_size_t(os.cpu_count() or 1)  # as many threads may run it at once
        made = self._library.AOTInductorModelContainerCreateWithDevice(
            ctypes.byref(self._container), copies, b"cpu", None
        )
        if made != 0:
            raise BrokenEntryError(f"{path} cannot be initialised (status {made})")
        names = [name for name, _ in request.inputs] + [request.uniform[0]]
        self._codes = [_dtype_code(name) for name in names]

    def __call__(self, tensors: list[Tensor]) -> None:
        wrap = _wrap()
        inputs = (ctypes.c_void_p * len(tensors))()
        at = ctypes.addressof(inputs)
        for index, (tensor, code) in enumerate(zip(tensors, self._codes, strict=True)):
            dims = tensor.dim()
            wrap(
                tensor.data_ptr(),
                dims,
                (ctypes.c_int64 * dims)(*tensor.shape),
                (ctypes.c_int64 * dims)(*tensor.stride()),
                0,
                code,
                0,
                0,
                at + index * ctypes.sizeof(ctypes.c_void_p),
            )
        outputs = (ctypes.c_void_p * 1)()
        status = self._run(self._container, inputs, len(tensors), outputs, 0, None, None)
        if status != 0:
            raise RuntimeError(f"a compiled step failed with status {status}")


@lru_cache(maxsize=1)
def _torch_library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


@lru_cache(maxsize=1)
def _wrap() -> Any:
    """Torch's stable C function that makes a tensor of memory, without owning it."""
    function = _torch_library().aoti_torch_create_tensor_from_blob
    pointer, whole, short = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    function.argtypes = [pointer, whole, pointer, pointer, whole, short, short, short, pointer]
    return function


@lru_cache(maxsize=None)
def _dtype_code(name: str) -> int:
    return int(getattr(_torch_library(), f"aoti_torch_dtype_{name}")())


def load(folder: Path, request: Request) -> CompiledStep | None:
    """A compiled step from disk; None if there is none.

    Raises:
        BrokenEntryError: what is there is not what was written.
    """
    path, facts = entry_files(folder, request.key, request.device)
    return CompiledStep(path, request) if is_there(path, facts) else None
