"""Replicas of a model, stacked in one process: their gradients, each on its own batch."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hooks.averaging.over_replicas import OverReplicas, at_once
from hooks.averaging.stacked import StackedReplicas

Loss = Callable[..., Tensor]
"""``loss(model, *batch)``, a 0-d tensor; ``model`` is called as the module is."""


class ReplicatedModel:
    """As many replicas of a module as there would be ranks, equal at first, each with its own data.

    For replica ``k`` with parameters ``x_k`` and batch ``b_k``, :meth:`gradients` is

        g_k = d loss(x_k, b_k) / d x_k

    A :class:`~hooks.averaging.ReplicatedOptimizer` makes the inner steps, and any averager that is
    made with ``process_group=model.replicas`` takes the means. Given the same gradients, the whole
    is what ranks do, bit for bit; with ``over=one_by_one`` gradients are those of ranks too.

    Args:
        module: that all replicas begin as. It is called with their parameters in place of its own,
            which are left alone.
        count: how many replicas.
        over: :func:`~hooks.averaging.at_once`, or :func:`~hooks.averaging.one_by_one`, which
            computes what ranks would, bit for bit, in more time.

    Attributes:
        params: by name, leaf tensors of shape (count, ...), the same objects for ever.
        buffers: by name, of shape (count, ...).
        replicas: what averagers take as ``process_group``.

    Raises:
        ValueError: ``count`` below 1.

    Example::

        >>> from functional_optim import sgd
        >>> from hooks.averaging import OuterModelAverager, ReplicatedOptimizer
        >>> model = ReplicatedModel(nn.Linear(2, 1), 3)
        >>> inner = ReplicatedOptimizer(model.params, sgd(lr=0.1))
        >>> outer = OuterModelAverager(
        ...     model.params.values(), sgd(lr=0.7, momentum=0.9, nesterov=True), period=2,
        ...     process_group=model.replicas)
        >>> for step in range(2):
        ...     losses, grads = model.gradients(
        ...         lambda model, inputs: model(inputs).square().mean(), torch.randn(3, 5, 2))
        ...     inner.step(grads)
        ...     outer.average_parameters()
        >>> losses.shape, bool((model.params["weight"] == model.params["weight"][0]).all())
        (torch.Size([3]), True)
    """

    def __init__(self, module: nn.Module, count: int, *, over: OverReplicas = at_once) -> None:
        self.replicas = StackedReplicas(count)
        self._module, self._over = module, over
        self.params: dict[str, Tensor] = {
            name: nn.Parameter(_repeated(one, count)) for name, one in module.named_parameters()
        }
        self.buffers: dict[str, Tensor] = {
            name: _repeated(one, count) for name, one in module.named_buffers()
        }

    def gradients(self, loss: Loss, *batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each replica on its own batch, and its gradients; buffers are updated.

        Args:
            loss: ``loss(model, *batch)``, 0-d.
            batch: tensors, or trees of them, of shape (count, ...): a batch for each replica.

        Returns:
            (losses, gradients): of shape (count,), and by name, as ``params``.

        Raises:
            ValueError: a tensor of ``batch`` without a slice for each replica.
        """
        self.replicas.check([one for one in batch if isinstance(one, Tensor)])

        def of_one(
            params: dict[str, Tensor], buffers: dict[str, Tensor], *given: Any
        ) -> tuple[Tensor, dict[str, Tensor]]:
            # Forward passes write to buffers, which torch.func does not let them do from outside.
            held = {**params, **{name: one.clone() for name, one in buffers.items()}}

            def model(*args: Any, **named: Any) -> Any:
                return torch.func.functional_call(self._module, held, args, named)

            return loss(model, *given), {name: held[name] for name in buffers}

        both = torch.func.grad_and_value(of_one, has_aux=True)
        params = {name: param.detach() for name, param in self.params.items()}
        grads, (losses, buffers) = self._over(both)(params, self.buffers, *batch)
        for name, value in buffers.items():
            self.buffers[name].copy_(value)
        return losses, grads

    @torch.no_grad()
    def replica(self, number: int) -> nn.Module:
        """A module of its own, with what a replica has now.

        Args:
            number: of the replica, from 0.
        """
        made = copy.deepcopy(self._module)
        for name, param in made.named_parameters():
            param.copy_(self.params[name][number])
        for name, buffer in made.named_buffers():
            buffer.copy_(self.buffers[name][number])
        return made


def _repeated(tensor: Tensor, count: int) -> Tensor:
    return tensor.detach().expand(count, *tensor.shape).clone()
