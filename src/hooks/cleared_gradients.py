"""A warning for gradients that nobody cleared between two iterations.

A hook steps while backward goes on, so a loop has no ``optimizer.step()`` that would remind one of
``zero_grad()``. Without it, each iteration steps by the sum of all gradients so far.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch import values_of


class ClearedGradients:
    """Looks at ``.grad`` as the first gradient of an iteration arrives; warns once.

    Backward passes under ``ddp.no_sync()`` add to ``.grad`` on purpose: only the first pass after
    a step is looked at.

    Args:
        params: that are stepped.
        all_of_them: whether any of them may have no part in a backward pass. Otherwise the smallest
            one is looked at.
    """

    def __init__(self, params: Iterable[Tensor], *, all_of_them: bool) -> None:
        watched = [param for param in params if param.requires_grad and param.numel()]
        if not all_of_them:
            watched = sorted(watched, key=Tensor.numel)[:1]
        self._has_stepped = self._has_warned = False
        self._is_dirty: dict[int, bool] = {}
        """By ``id`` of a parameter with a new gradient, whether ``.grad`` was no zero before it."""
        # A parameter holds its hooks, so these hold neither the parameter nor this object.
        me = weakref.ref(self)
        handles = []
        for one in watched:
            own = weakref.ref(one)
            looks = _Call(me, own, ClearedGradients.look)
            added = _Call(me, own, ClearedGradients.added)
            handles += [
                one.register_hook(looks),
                one.register_post_accumulate_grad_hook(added),
            ]
        weakref.finalize(self, _remove, handles).atexit = False

    def end_iteration(self) -> None:
        """All parameters are stepped: gradients have to be cleared now."""
        self._has_stepped = True

    def look(self, param: Tensor) -> None:
        """A gradient of this parameter was computed, perhaps by ``torch.autograd.grad`` alone."""
        if self._has_stepped and not self._has_warned:
            self._is_dirty[id(param)] = param.grad is not None and _is_nonzero(param.grad)

    def added(self, param: Tensor) -> None:
        """A gradient of this parameter was added to ``.grad``."""
        if not self._has_stepped:
            return
        self._has_stepped, is_dirty = False, self._is_dirty.get(id(param), False)
        self._is_dirty.clear()
        if not is_dirty:
            return
        self._has_warned = True
        warnings.warn(
            "gradients were not cleared since the last step: this backward pass adds to them, and "
            "the hook steps by the sum; call ddp.zero_grad() after each backward pass (to "
            "accumulate on purpose, run the passes before the last one under ddp.no_sync())",
            UserWarning,
            stacklevel=2,
        )


class _Call:
    """A hook of one parameter, which calls a method."""

    def __init__(
        self,
        owner: "weakref.ref[ClearedGradients]",
        param: "weakref.ref[Tensor]",
        method: Callable[["ClearedGradients", Tensor], None],
    ) -> None:
        self._owner, self._param, self._method = owner, param, method

    def __call__(self, _given: Any) -> None:
        owner, param = self._owner(), self._param()
        if owner is not None and param is not None:
            self._method(owner, param)


def _is_nonzero(grad: Tensor) -> bool:
    held = values_of(grad) if grad.is_sparse else grad
    return bool(torch.count_nonzero(held.detach()))


def _remove(handles: Iterable[Any]) -> None:
    for one in handles:
        one.remove()
