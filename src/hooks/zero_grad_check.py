"""Warning for gradients that were not cleared between two iterations.

A hook steps during backward, so the training loop has no ``optimizer.step()`` that would remind
users of ``zero_grad()``. Without it, each iteration steps by the sum of all gradients so far.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.tensors import values_of


class ZeroGradCheck:
    """Looks at ``.grad`` before the first gradient of an iteration is added, and warns once.

    Backward passes under ``ddp.no_sync()`` add to ``.grad`` on purpose, so only the first pass
    after a step is checked.

    Args:
        params: the parameters that are stepped.
        all_of_them: True if any of them may be unused in a backward pass. Otherwise only the
            smallest parameter is checked.
    """

    def __init__(self, params: Iterable[Tensor], *, all_of_them: bool) -> None:
        watched = [param for param in params if param.requires_grad and param.numel()]
        if not all_of_them:
            watched = sorted(watched, key=Tensor.numel)[:1]
        self._has_stepped = self._has_warned = False
        self._is_dirty: dict[int, bool] = {}
        """By ``id`` of a parameter, True if its ``.grad`` was nonzero before the new gradient."""
        handles = []
        for one in watched:
            before = _hook_of(self, one, ZeroGradCheck.check_before_add)
            after = _hook_of(self, one, ZeroGradCheck.warn_after_add)
            handles += [
                one.register_hook(before),
                one.register_post_accumulate_grad_hook(after),
            ]
        weakref.finalize(self, _remove, handles).atexit = False

    def end_iteration(self) -> None:
        """Expect cleared gradients from now on: all parameters are stepped."""
        self._has_stepped = True

    def check_before_add(self, param: Tensor) -> None:
        """Check ``.grad`` before a gradient is added to it."""
        if self._has_stepped and not self._has_warned:
            self._is_dirty[id(param)] = param.grad is not None and _is_nonzero(param.grad)

    def warn_after_add(self, param: Tensor) -> None:
        """Warn if ``.grad`` was nonzero before the new gradient was added to it."""
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


def _hook_of(
    check: ZeroGradCheck, param: Tensor, method: Callable[[ZeroGradCheck, Tensor], None]
) -> Callable[[Any], None]:
    """Return a hook of a parameter that calls a method of the check.

    Parameters refer to their hooks, so a hook has only weak references.
    """
    weak_check, weak_param = weakref.ref(check), weakref.ref(param)

    def hook(_given: Any) -> None:
        owner, own = weak_check(), weak_param()
        if owner is not None and own is not None:
            method(owner, own)

    return hook


def _is_nonzero(grad: Tensor) -> bool:
    values = values_of(grad) if grad.is_sparse else grad
    return bool(torch.count_nonzero(values.detach()))


def _remove(handles: Iterable[Any]) -> None:
    for one in handles:
        one.remove()
