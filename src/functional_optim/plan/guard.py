"""Checks of tensors' layouts and addresses, by loops in C.

A step of many small parameters takes about as long as one check of each of them, so these checks
must be fast. For 10,000 tensors, ``Tensor.is_set_to`` takes 3 ms, and comparing addresses and
torch.compile's guards takes 1 ms. With cold caches, both take two to four times as long. Our own
loops in C++ then take 0.4 ms.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, eq
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch.tensors import DisableTorchFunction, TensorGuards
from functional_optim.native import LOOPS

DTYPE = attrgetter("dtype")
SHAPE = attrgetter("shape")
DEVICE = attrgetter("device")
IS_LEAF = attrgetter("is_leaf")
_GRAD = attrgetter("grad")


class Kinds(NamedTuple):
    """Shapes, dtypes and devices of tensors, in their order."""

    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    devices: list[torch.device]


def kinds_of(tensors: Sequence[Tensor]) -> Kinds:
    """Return the shapes, dtypes and devices of tensors. No Python runs per tensor."""
    return Kinds(list(map(SHAPE, tensors)), list(map(DTYPE, tensors)), list(map(DEVICE, tensors)))


class NativeGuard:
    """Record of tensors in the native loops.

    Args:
        leaves: number of first tensors that must be leaves of autograd.
    """

    def __init__(self, leaves: int = 0) -> None:
        self._leaves = leaves
        self.known: Callable[[list[Tensor], bool], bool] | None = None
        """Check of layouts (and of addresses, if the flag is True); None before ``learn``."""

    def hold(self, tensors: Sequence[Tensor], *, where: bool) -> bool:
        """Return True if tensors have the recorded layouts, and addresses if ``where`` is True."""
        known = self.known
        return known is not None and known(list_of(tensors), where)

    def learn(self, tensors: Sequence[Tensor]) -> None:
        """Record the layouts and addresses of tensors."""
        loops = LOOPS.get(len(tensors))
        places = None if loops is None else loops.remember(list_of(tensors), self._leaves)
        self.known = None if loops is None or places is None else partial(loops.hold, places)


def list_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a sequence as a list."""
    return tensors if isinstance(tensors, list) else list(tensors)


def mark_changed(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that tensors were written to."""
    loops = LOOPS.loaded or LOOPS.get(len(tensors))
    if loops is None:
        torch.autograd.graph.increment_version(tensors)
    else:
        loops.bump(tensors if isinstance(tensors, list) else list(tensors))


def grads_of(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the ``.grad`` of each tensor."""
    loops = LOOPS.loaded or LOOPS.get(len(tensors))
    every = tensors if isinstance(tensors, list) else list(tensors)
    found = None if loops is None else loops.grads(every)
    return list(map(_GRAD, tensors)) if found is None else found


def mask_of(gradients: Sequence[Any]) -> bytes | None:
    """Return which gradients are present, as bytes; None if all are."""
    if LOOPS.loaded is not None:
        every = gradients if isinstance(gradients, list) else list(gradients)
        return LOOPS.loaded.mask(every)
    if type(None) in map(type, gradients):
        return bytes([one is not None for one in gradients])
    return None


class LayoutGuard:
    """Guard that tensors have the layouts of examples, in the same order.

    It compares shapes, strides, dtypes, devices, and the conjugate and negative bits. It does not
    compare ``requires_grad``.

    Args:
        examples: dense tensors. They are not kept.

    Example::

        >>> import torch
        >>> alike = LayoutGuard([torch.zeros(2, 3), torch.zeros(4)])
        >>> alike([torch.ones(2, 3), torch.ones(4)])
        True
        >>> alike([torch.ones(3, 2).t(), torch.ones(4)])
        False
    """

    def __init__(self, examples: Sequence[Tensor]) -> None:
        self._traits = _traits(examples)
        self._guards = _guards(examples)
        self._native = NativeGuard()

    def __call__(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if the tensors have the layouts of the examples.

        Args:
            tensors: dense tensors, one for each example.
        """
        known = self._native.known
        if known is not None and isinstance(tensors, list) and known(tensors, False):
            return True
        if self._guards is not None and self._guards.check(*tensors):
            if LOOPS.loaded is not None:
                self._native.learn(tensors)
            return True
        if _traits(tensors) != self._traits:
            return False
        self._native.learn(tensors)
        # torch's guards also check classes and requires_grad, so they are built again.
        self._guards = _guards(tensors)
        return True


def _traits(tensors: Sequence[Tensor]) -> list[list[Any]]:
    return [
        *kinds_of(tensors),
        *(list(map(ask, tensors)) for ask in (Tensor.stride, Tensor.is_conj, Tensor.is_neg)),
    ]


def _guards(examples: Sequence[Tensor]) -> Any:
    """Return torch.compile's guards of inputs; None if there is nothing to guard."""
    if TensorGuards is None or not examples:
        return None
    try:
        return TensorGuards(
            *examples,
            dynamic_dims_sizes=list(map(list, map(SHAPE, examples))),
            dynamic_dims_strides=list(map(list, map(Tensor.stride, examples))),
        )
    except (TypeError, ValueError, RuntimeError):  # another torch, another signature
        return None


class MemoryGuard:
    """Guard that tensors have the layouts and the addresses of views.

    Args:
        views: of memory that the caller keeps alive, so that no other tensor can get it.
        leaves: number of first tensors that must be leaves of autograd.
    """

    def __init__(self, views: Sequence[Tensor], *, leaves: int = 0) -> None:
        self.alike = LayoutGuard(views)
        """Guard of the layouts of the views, at any address."""
        self._starts, self._leaves = list(map(Tensor.data_ptr, views)), leaves
        self._native = NativeGuard(leaves)

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if each tensor is the same memory, shape, strides and dtype as its view.

        False may also mean that the check is not possible: then call ``difference``.

        Args:
            tensors: one for each view.
        """
        known = self._native.known  # not by a method: a step of few tensors needs few Python calls
        if known is not None and isinstance(tensors, list) and known(tensors, True):
            return True
        # A mode such as that of torch.set_default_device would run Python at every call.
        with DisableTorchFunction():
            try:
                there = all(map(eq, map(Tensor.data_ptr, tensors), self._starts))
                held = there and all(map(IS_LEAF, tensors[: self._leaves])) and self.alike(tensors)
            except RuntimeError:  # a sparse tensor, or a tensor without memory
                return False
        if held and LOOPS.loaded is not None:
            self._native.learn(tensors)
        return held
