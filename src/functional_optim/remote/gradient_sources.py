"""Gradients of all workers: where each worker finds them, clipping and unscaling."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.frontends import gradient_norms
from functional_optim.frontends.loss_scale import check_and_unscale_
from functional_optim.remote.placement import PlacedParam, name_gradients
from functional_optim.remote.transport import load_torch_rpc
from functional_optim.remote.workers import Sources, Workers

Gradients = Any
"""The id of a distributed autograd context; or a gradient, or None, for each parameter: a list, or
a mapping by name. A parameter that the mapping lacks has no gradient."""


_LOCAL: Mapping[str, Callable[[Any, float], Any]] = {
    "addends": gradient_norms.addends,
    "scale_": gradient_norms.scale_,
    "unscale_": check_and_unscale_,
}
"""Operations on gradients in this process. Workers have methods with the same names."""


class WorkerGradients:
    """Checked gradients of all workers: in this process, or in an autograd context on the workers.

    Raises:
        TypeError, ValueError: gradients that do not fit, or a context on workers without contexts.
        RuntimeError: the context is not open in this process.
    """

    def __init__(
        self, gradients: Gradients, workers: Workers, params: Sequence[PlacedParam]
    ) -> None:
        self._workers = workers
        self._in_context = isinstance(gradients, int) and not isinstance(gradients, bool)
        self.sources: Sources
        if not self._in_context:
            self.sources = workers.split_gradients(name_gradients(gradients, params))
            return
        if not workers.transport.has_contexts:
            raise TypeError(
                f"these workers have no distributed autograd contexts, got the id {gradients}; "
                "give step the gradients"
            )
        if not load_torch_rpc().contexts.is_open(gradients):
            raise RuntimeError(
                f"there is no distributed autograd context {gradients} in this process; call step "
                "inside of torch.distributed.autograd.context(), with the id that it gave"
            )
        self.sources = dict.fromkeys(workers.worker_groups, gradients)

    def clip(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Scale gradients to a joint norm of at most ``max_norm``. Return the norm before."""
        total = gradient_norms.clip(
            lambda order: self._workers.order_by_parameter(self._call("addends", order)),
            lambda factor: self._call("scale_", factor),
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )
        return torch.tensor(total, dtype=torch.float64)

    def unscale(self, scale: float) -> bool:
        """Divide gradients by a scale. Return True if some are not finite."""
        return any(self._call("unscale_", scale).values())

    def _call(self, method: str, value: float) -> dict[str, Any]:
        """Call a method with each worker's gradients and a number."""
        if self._in_context:
            return self._workers.call_each(method, self.sources, value)
        return {worker: _LOCAL[method](grads, value) for worker, grads in self.sources.items()}
