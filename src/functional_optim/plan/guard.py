"""Checks of tensors' layouts and addresses, by loops in C.

A step of many small parameters takes about as long as looking at each of them once, so this is on
the fast path. ``Tensor.is_set_to`` takes 3 ms for 10,000 tensors, addresses and what torch.compile
guards its inputs with together 1 ms, all of it twice to four times as much once a step has taken
the caches; our own loops in C++ take 0.4 ms then.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from operator import attrgetter, eq
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch import DisableTorchFunction, TensorGuards
from functional_optim.native import LOOPS

DTYPE = attrgetter("dtype")
SHAPE = attrgetter("shape")
DEVICE = attrgetter("device")
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
    """Record of tensors in the native loops."""

    def __init__(self) -> None:
        self.known: Callable[[list[Tensor], bool], bool] | None = None
        """Whether tensors are like those, and lie there if that is asked; None: nobody knows."""

    def hold(self, tensors: Sequence[Tensor], *, where: bool) -> bool:
        """Return True if tensors are known to have the layouts, and the addresses if ``where``."""
        known = self.known
        return known is not None and known(list_of(tensors), where)

    def learn(self, tensors: Sequence[Tensor]) -> None:
        """These are what is looked for."""
        loops = LOOPS.get(len(tensors))
        places = None if loops is None else loops.remember(list_of(tensors))
        self.known = None if loops is None or places is None else partial(loops.hold, places)


def list_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a sequence as a list."""
    return tensors if isinstance(tensors, list) else list(tensors)


def mark_changed(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that they were written to."""
    loops = LOOPS.loaded or LOOPS.get(len(tensors))
    if loops is None:
        torch.autograd.graph.increment_version(tensors)
    else:
        loops.bump(tensors if isinstance(tensors, list) else list(tensors))


def grads_of(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The ``.grad`` of each."""
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
    """Guard: tensors have the layouts of others, in their order.

    The same shapes, strides, dtypes and devices; nothing conjugated or negated that the others do
    not have so. It matters not whether they require grad.

    Args:
        examples: the others, dense ones; they are not kept.

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

    def __call__(self, tensors: Sequence[Tensor], which: Sequence[bool] | None = None) -> bool:
        """Return True if they are.

        Args:
            tensors: dense ones, one for each example.
            which: which of the examples the tensors stand for, if not for all.
        """
        if which is not None:
            return _traits(tensors) == [list(compress(trait, which)) for trait in self._traits]
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
        # Guards know of more: of classes, and of who requires grad. They learn from what fits.
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
    """Guard: tensors are certain stretches of memory.

    Args:
        views: the stretches; their memory must be kept elsewhere, so that it is nobody else's.
    """

    def __init__(self, views: Sequence[Tensor]) -> None:
        self.alike = LayoutGuard(views)
        """Whether tensors are like the views, wherever they lie."""
        self._starts = list(map(Tensor.data_ptr, views))
        self._native = NativeGuard()

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if each tensor is the same memory, shape, strides and dtype as its view.

        False may also mean that these tensors cannot tell: then ask ``difference``.

        Args:
            tensors: one for each view.
        """
        known = self._native.known  # asked here, since each call counts in a step of few tensors
        if known is not None and isinstance(tensors, list) and known(tensors, True):
            return True
        # A mode such as that of torch.set_default_device would run Python at every call.
        with DisableTorchFunction():
            try:
                there = all(map(eq, map(Tensor.data_ptr, tensors), self._starts))
                held = there and self.alike(tensors)
            except RuntimeError:  # a sparse tensor, or one without memory of its own
                return False
        if held and LOOPS.loaded is not None:
            self._native.learn(tensors)
        return held
