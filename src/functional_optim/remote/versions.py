"""Versions of a parameter: what somebody reads stays as it is, whatever steps are made meanwhile.

While no step finds a reader of the parameter's memory, readers share that memory, and nothing is
copied. The first step that finds one gives the parameter other memory, and leaves the old one to
its readers. From there on each reader of this parameter, which is contested, is given a copy, so
that the parameter stays where it is.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack

from functional_optim.plan.flat.apart import reasons_apart
from functional_optim.plan.flat.layout import own_copy


class Lease:
    """Held by who reads; once it is given back, what was read may be overwritten."""

    def __init__(self) -> None:
        self.given_back = False


class VersionedParam(NamedTuple):
    """A parameter as it is read."""

    tensor: Tensor
    """A leaf of autograd; it requires a gradient where the parameter does."""
    copied_bytes: int
    """0 where it shares the parameter's memory."""


class _Reader(NamedTuple):
    address: int
    """Where the parameter was; its optimizer may have moved it since."""
    memory: StorageWeakRef
    lease: Lease


class Versions:
    """The versions of one parameter. Whoever calls it holds the turn of the parameter's worker.

    Args:
        contested: whether the parameter has to stay where it is, so that readers have copies.

    Example::

        >>> weight, versions = torch.ones(2), Versions()
        >>> lease = Lease()
        >>> leaf = leaves([weight], [versions], [lease])[0]
        >>> versions.make_way(weight)  # 8 bytes were copied, for there is a reader
        8
        >>> weight.zero_(), leaf.tensor
        (tensor([0., 0.]), tensor([1., 1.]))
    """

    def __init__(self, *, contested: bool = False) -> None:
        self.number = 0
        """Of the steps that were made."""
        self._contested = contested
        self.readers: list[_Reader] = []
        """Those who may read what it shares."""

    def leaf(self, param: Tensor, lease: Lease) -> VersionedParam:
        """The parameter as it is now, for a reader. Called where no gradients are recorded.

        Args:
            param: the parameter.
            lease: the reader's.
        """
        if self._contested:
            made, copied = own_copy(param), param.numel() * param.element_size()
        else:
            # With a storage of its own over the same memory: it lives as long as anything that
            # autograd or the reader has made of it does, views and detached tensors too.
            made, copied = from_dlpack(to_dlpack(param.detach())), 0
            memory = StorageWeakRef(made.untyped_storage())
            self.readers = [*self._left(param), _Reader(param.data_ptr(), memory, lease)]
        return VersionedParam(made.requires_grad_(param.requires_grad), copied)

    def stay(self) -> None:
        """Readers have copies from now on, so that the parameter need not be moved."""
        self._contested = True

    def make_way(self, param: Tensor) -> int:
        """Let the parameter be written to: in place, or, if it is being read, in other memory.

        Returns:
            The bytes that were copied.
        """
        self.readers = self._left(param)
        if not self.readers:
            return 0
        self.readers, self._contested = [], True
        with torch.inference_mode(mode=False), torch.no_grad():
            param.data = own_copy(param)
        return param.numel() * param.element_size()

    def _left(self, param: Tensor) -> list[_Reader]:
        """Return the readers of the parameter's current memory."""
        if not self.readers:
            return []
        return [
            one
            for one in self.readers
            if one.address == param.data_ptr()
            and not (one.lease.given_back or one.memory.expired())
        ]


def leaves(
    params: Sequence[Tensor], versions: Sequence[Versions], leases: Sequence[Lease]
) -> list[VersionedParam]:
    """Parameters as they are now, for a reader.

    Args:
        params: the parameters.
        versions: of each.
        leases: of each; they may be one.
    """
    with torch.inference_mode(mode=False), torch.no_grad():
        found = zip(versions, params, leases, strict=True)
        return [one.leaf(param, lease) for one, param, lease in found]


_ALL: dict[int, tuple["weakref.ref[Tensor]", Versions]] = {}
"""By the id of the parameter."""

_LOCK = threading.RLock()


def versions_of(params: Sequence[Tensor], *, movable: bool = True) -> list[Versions]:
    """The versions of parameters, which all optimizers of this process share.

    Args:
        params: the parameters.
        movable: whether those that nobody else has memory in common with may be given other
            memory, which their optimizer must notice. Readers of others have copies from the start.
    """
    with _LOCK:
        new = [param for param in params if not _is_known(param)]
        reasons = reasons_apart(new, [""] * len(new))
        for place, param in enumerate(new):
            made = Versions(contested=place in reasons)
            _ALL[id(param)] = weakref.ref(param), made
            weakref.finalize(param, _drop, id(param), made)
        found = [_ALL[id(param)][1] for param in params]
    if not movable:
        for one in found:
            one.stay()
    return found


def _is_known(param: Tensor) -> bool:
    return id(param) in _ALL and _ALL[id(param)][0]() is param


def _drop(key: int, versions: Versions) -> None:
    with _LOCK:
        if key in _ALL and _ALL[key][1] is versions:
            del _ALL[key]
