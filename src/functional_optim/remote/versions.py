"""Versions of parameters: steps do not change what readers have read.

Readers share memory with the parameter, without a copy, until a step writes to it. The first such
step copies the parameter to new memory, and leaves the old memory to the readers. The parameter
then counts as contested: every later reader gets a copy, so that the parameter need not move again.
"""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack
from torch.utils.weak import WeakTensorKeyDictionary

from functional_optim.engine.tensors import copy_with_strides, immovable_reasons


class Lease:
    """Flag of a reader: steps may overwrite the memory that it read if ``given_back`` is True."""

    def __init__(self) -> None:
        self.given_back = False


class _Reader(NamedTuple):
    address: int
    """The address of the parameter when it was read. Its optimizer may have moved it since."""
    memory: StorageWeakRef
    lease: Lease


class Versions:
    """Version and readers of one parameter. Callers hold the lock of the parameter's worker."""

    def __init__(self, *, contested: bool = False) -> None:
        self.number = 0
        """The number of steps of the parameter."""
        self.is_contested = contested
        """True if the parameter must not move, so that readers get copies."""
        self.readers: list[_Reader] = []
        """Readers that share memory with the parameter."""

    def read(self, param: Tensor, lease: Lease) -> Tensor:
        """Return the current parameter for a reader. The caller has disabled gradients."""
        if self.is_contested:
            made = copy_with_strides(param)
        else:
            # A new storage over the same memory. It lives as long as any tensor that autograd or
            # the reader derives from it, including views and detached tensors.
            made = from_dlpack(to_dlpack(param.detach()))
            memory = StorageWeakRef(made.untyped_storage())
            self.readers = [*self._active_readers(param), _Reader(param.data_ptr(), memory, lease)]
        return made.requires_grad_(param.requires_grad)

    def copy_if_read(self, param: Tensor) -> int:
        """Move the parameter to new memory if it has readers. Call this before a write."""
        self.readers = self._active_readers(param)
        if not self.readers:
            return 0
        self.readers, self.is_contested = [], True
        with torch.inference_mode(mode=False), torch.no_grad():
            param.data = copy_with_strides(param)
        return param.nbytes

    def _active_readers(self, param: Tensor) -> list[_Reader]:
        """Return the readers of the parameter's current memory."""
        if not self.readers:
            return []
        return [
            one
            for one in self.readers
            if one.address == param.data_ptr()
            and not (one.lease.given_back or one.memory.expired())
        ]


def read_all(
    params: Sequence[Tensor], versions: Sequence[Versions], leases: Sequence[Lease]
) -> list[Tensor]:
    """Return the current parameters for readers, as leaves of autograd.

    A leaf requires a gradient if its parameter does. The leases may be the same object.
    """
    with torch.inference_mode(mode=False), torch.no_grad():
        found = zip(versions, params, leases, strict=True)
        return [one.read(param, lease) for one, param, lease in found]


_ALL: Any = WeakTensorKeyDictionary()
"""The versions of each parameter."""

_LOCK = threading.Lock()


def param_versions(params: Sequence[Tensor], *, movable: bool = True) -> list[Versions]:
    """Return the versions of parameters, shared by all optimizers of this process.

    Only ``movable`` parameters move to new memory. Readers always get copies of other parameters,
    and of parameters that share memory.
    """
    with _LOCK:
        new = [one for one in params if one not in _ALL]
        reasons = immovable_reasons(new, [""] * len(new))
        for index, param in enumerate(new):
            _ALL[param] = Versions(contested=index in reasons)
        found: list[Versions] = [_ALL[param] for param in params]
    if not movable:
        for one in found:
            one.is_contested = True
    return found
