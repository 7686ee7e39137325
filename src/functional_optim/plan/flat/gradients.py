"""FlatGradients: buffers that autograd adds to, or that gradients are copied to.

The work of each step is done by loops in C: with many small parameters, Python code per parameter
would take longer than the step itself.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.operators import foreach_copy_
from functional_optim._torch.tensors import DisableTorchFunction
from functional_optim.core.buffer_memory import lazy_zeros
from functional_optim.core.checks import check_grad
from functional_optim.core.leaf import PLAIN
from functional_optim.plan.flat.buffer import FlatBuffer, difference
from functional_optim.plan.guard import kinds_of
from functional_optim.plan.list_layout import MemoryGuard

_DENSE, _LAYOUT = {torch.strided}, attrgetter("layout")


class FlatGradients:
    """Gradient buffers for the flat buffers of parameters."""

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        params: Sequence[Tensor],
        order: Sequence[int],
        given: int,
    ) -> None:
        self.params = params
        self.order = order
        self.given = given
        self.names = [segment.name for buffer in buffers for segment in buffer.segments]
        with torch.inference_mode(mode=False), torch.no_grad():
            self.buffers = [lazy_zeros(buffer.data) for buffer in buffers]
            views = [
                view
                for buffer, flat in zip(buffers, self.buffers, strict=True)
                for view in buffer.views(flat)
            ]
            self.views = [
                like(param, view).detach() for param, view in zip(params, views, strict=True)
            ]
            self._in_order = list(order) == list(range(given))
        self.kinds = kinds_of(self.views)
        self.guard = MemoryGuard(self.views)

    def attach(self) -> None:
        """Set ``.grad`` of each parameter to its view, with the values of its old gradient."""
        pairs = [
            (param, view)
            for param, view in zip(self.params, self.views, strict=True)
            if param.requires_grad
        ]
        for name, param in zip(self.names, self.params, strict=True):
            if param.requires_grad and param.grad is not None:
                _check_plain(param, param.grad, name)
        with torch.no_grad():
            for param, view in pairs:
                if param.grad is None:
                    view.zero_()
                elif difference(param.grad, view) is not None:
                    view.copy_(param.grad)
                # A new tensor: changes of the gradient's layout must not change our view.
                param.grad = view.detach()

    def zero(self) -> None:
        """Fill the buffers with zeros."""
        with torch.no_grad():
            for flat in self.buffers:
                flat.zero_()

    def of_members(self, grads: Sequence[Any]) -> list[Any]:
        """Return the gradients of the parameters in buffers, in the order of the segments."""
        if len(grads) != self.given:
            raise ValueError(
                f"grads has length {len(grads)}, but the layout was given {self.given} "
                "parameters: one gradient for each, in the same order"
            )
        if self._in_order and isinstance(grads, list):
            return grads
        return list(map(grads.__getitem__, self.order))

    def in_place(self, grads: Sequence[Any]) -> bool:
        """Return True if the gradients of all parameters in buffers are the views."""
        mine = self.of_members(grads)
        with DisableTorchFunction():
            for grad, view in zip(mine[:1], self.views, strict=False):  # usually decides
                if type(grad) not in PLAIN or difference(grad, view) is not None:
                    return False
            if not PLAIN.issuperset(map(type, mine)):
                return False
            if self.guard.hold(mine):
                return True
        pairs = zip(mine, self.views, strict=True)
        return all(difference(grad, view) is None for grad, view in pairs)

    def alike(self, grads: Sequence[Any]) -> bool:
        """Return True if the gradients of all parameters in buffers have the layouts of the views.

        The views of complex parameters are complex.
        """
        mine = self.of_members(grads)
        return self.guard.layout.hold(mine)

    def gather(self, grads: Sequence[Any]) -> None:
        """Copy gradients into the buffers."""
        mine = self.of_members(grads)
        # A mode such as that of torch.set_default_device would run Python at every call.
        with DisableTorchFunction(), torch.no_grad():
            if not self._fit(mine):
                for param, grad, name in zip(self.params, mine, self.names, strict=True):
                    _check_plain(param, grad, name)
            mine = self._clone_from_buffers(mine)
            if mine:
                foreach_copy_(self.views, mine)

    def _fit(self, mine: list[Any]) -> bool:
        """Return True if all gradients are plain tensors that can be copied to the views."""
        if not PLAIN.issuperset(map(type, mine)) or not _DENSE.issuperset(map(_LAYOUT, mine)):
            return False
        return self.guard.layout.hold(mine) or kinds_of(mine) == self.kinds

    def _clone_from_buffers(self, mine: list[Tensor]) -> list[Tensor]:
        """Return the gradients. Clone those at another position of the gradient buffers."""
        memory = {flat.untyped_storage().data_ptr() for flat in self.buffers}
        held = list(map(torch.UntypedStorage.data_ptr, map(Tensor.untyped_storage, mine)))
        if memory.isdisjoint(held):
            return mine
        return [
            grad.clone() if address in memory and difference(grad, view) is not None else grad
            for grad, view, address in zip(mine, self.views, held, strict=True)
        ]


def like(param: Tensor, view: Tensor) -> Tensor:
    """Return a real view of a buffer in the dtype of its parameter."""
    return torch.view_as_complex(view) if param.is_complex() else view


def _check_plain(param: Tensor, grad: Any, name: str) -> None:
    """Raise TypeError or ValueError if a gradient cannot be copied into a buffer."""
    if grad is None:
        raise ValueError(
            f"the gradient at {name!r} is missing, but a flat buffer is stepped whole: give zeros "
            "if that is what is meant, or keep the parameter out of the layout"
        )
    check_grad(param, grad, name)
    if grad.layout != torch.strided or type(grad) not in PLAIN:
        raise ValueError(
            f"the gradient at {name!r} is a {type(grad).__name__} with layout {grad.layout}; a "
            "flat buffer takes dense tensors: give grad.to_dense(), or keep the parameter out of "
            "the layout"
        )
