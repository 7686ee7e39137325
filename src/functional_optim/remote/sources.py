"""Sources of gradients for each worker, and the operations on gradients there."""

from typing import Any

import torch
from torch import Tensor

from functional_optim.frontends import gradient_norms
from functional_optim.remote.arranged import Arranged
from functional_optim.remote.placing import by_place
from functional_optim.remote.torch_rpc import torch_rpc
from functional_optim.remote.workers import Here, Sources, Workers

Gradients = Any
"""The id of a distributed autograd context; or a gradient, or None, for each parameter: a list, or
a mapping by name, in which a parameter that is not there has none."""


def sources_of(gradients: Gradients, workers: Workers, arranged: Arranged) -> Sources:
    """For each worker, where its gradients are found, checked.

    Raises:
        TypeError, ValueError: gradients that do not fit, or a context where there are none.
        RuntimeError: a context that is not open here.
    """
    if not _is_context(gradients):
        return workers.dealt(by_place(gradients, arranged.groups, arranged.given))
    if not workers.transport.has_contexts:
        raise TypeError(
            f"these workers have no distributed autograd contexts, got the id {gradients}; give "
            "step the gradients"
        )
    torch_rpc().check_context(gradients)
    return dict.fromkeys(workers.shares, gradients)


def where(gradients: Gradients, workers: Workers) -> Workers | Here:
    """Location of gradients: on the workers, or in this process."""
    return workers if _is_context(gradients) else Here()


def clip(
    sources: Sources,
    there: Workers | Here,
    workers: Workers,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scale gradients so that their joint norm is at most ``max_norm``; the norm before.

    Raises:
        ValueError, RuntimeError: as for :func:`gradient_norms.clip`.
    """
    total = gradient_norms.clip(
        lambda order: workers.in_order(there.each("addends", sources, order)),
        lambda factor: there.each("scale_", sources, factor),
        max_norm,
        norm_type,
        error_if_nonfinite=error_if_nonfinite,
    )
    return torch.tensor(total, dtype=torch.float64)


def unscale(sources: Sources, there: Workers | Here, scale: float) -> bool:
    """Divide gradients by a scale; whether some are not finite."""
    return any(there.each("unscale_", sources, scale).values())


def _is_context(gradients: Gradients) -> bool:
    return isinstance(gradients, int) and not isinstance(gradients, bool)
