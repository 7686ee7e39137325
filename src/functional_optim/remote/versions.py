"""Versions of a parameter: what somebody reads stays as it is, whatever steps are made meanwhile.

While no step finds a reader of the parameter's memory, readers share that memory, and nothing is
copied. The first step that finds one gives the parameter other memory, and leaves the old one to
its readers; its optimizer then lays out its flat buffers anew. That costs more than a copy, so from
there on each reader of this parameter, which is contested, is given a copy.
"""

import threading
import weakref
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from functional_optim.flat_layout import own_copy
from functional_optim.places import PLAIN


class Lease:
    """Held by who reads; once it is given back, what was read may be overwritten."""

    def __init__(self) -> None:
        self.given_back = False


class Leaf(NamedTuple):
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

    Example::

        >>> weight, versions = torch.ones(2), Versions()
        >>> lease = Lease()
        >>> leaf = versions.leaf(weight, lease)
        >>> versions.make_way(weight)  # 8 bytes were copied, for there is a reader
        8
        >>> weight.zero_(), leaf.tensor
        (tensor([0., 0.]), tensor([1., 1.]))
    """

    def __init__(self) -> None:
        self.number = 0
        """Of the steps that were made."""
        self._contested = False
        self._readers: list[_Reader] = []

    def leaf(self, param: Tensor, lease: Lease) -> Leaf:
        """The parameter as it is now, for a reader.

        Args:
            param: the parameter.
            lease: the reader's.
        """
        with torch.inference_mode(mode=False), torch.no_grad():
            if self._contested or not _can_share(param):
                made, copied = own_copy(param), param.numel() * param.element_size()
            else:
                # With a storage of its own over the same memory: it lives as long as anything that
                # autograd or the reader has made of it does, views and detached tensors too.
                made, copied = torch.from_dlpack(param.detach()), 0
                memory = StorageWeakRef(made.untyped_storage())
                self._readers = [*self._left(param), _Reader(param.data_ptr(), memory, lease)]
        return Leaf(made.requires_grad_(param.requires_grad), copied)

    def make_way(self, param: Tensor) -> int:
        """Let the parameter be written to: in place, or, if it is being read, in other memory.

        Returns:
            The bytes that were copied.
        """
        self._readers = self._left(param)
        if not self._readers:
            return 0
        self._readers, self._contested = [], True
        with torch.inference_mode(mode=False), torch.no_grad():
            param.data = own_copy(param)
        return param.numel() * param.element_size()

    def _left(self, param: Tensor) -> list[_Reader]:
        """Those who still read the memory that the parameter has."""
        if not self._readers:
            return []
        return [
            one
            for one in self._readers
            if one.address == param.data_ptr()
            and not (one.lease.given_back or one.memory.expired())
        ]


def _can_share(param: Tensor) -> bool:
    """Whether its memory can be given out; otherwise readers have copies."""
    plain = type(param) in PLAIN and param.layout == torch.strided
    return plain and not (param.is_conj() or param.is_neg())


_ALL: dict[int, tuple["weakref.ref[Tensor]", Versions]] = {}
"""By the id of the parameter: all optimizers of a process see the same versions."""

_LOCK = threading.RLock()


def versions_of(param: Tensor) -> Versions:
    """The versions of a parameter, which all optimizers of this process share."""
    key = id(param)
    with _LOCK:
        known = _ALL.get(key)
        if known is not None and known[0]() is param:
            return known[1]
        made = Versions()
        _ALL[key] = weakref.ref(param), made
        weakref.finalize(param, _drop, key, made)
        return made


def _drop(key: int, versions: Versions) -> None:
    with _LOCK:
        if key in _ALL and _ALL[key][1] is versions:
            del _ALL[key]
