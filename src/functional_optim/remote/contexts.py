"""Gradients of distributed autograd, and the parameter versions that its passes have read."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import autograd as dist_autograd

from functional_optim._torch.distributed import current_context_id, is_valid_context
from functional_optim.remote.snapshot import Reading, pack
from functional_optim.remote.versions import Lease, Versions, param_versions, read_all
from functional_optim.remote.worker import Exchange, WorkerLock

LOCK = WorkerLock()
"""Lock of this process: its optimizers may have parameters in common."""


class _ReadRecord(NamedTuple):
    """Version of one parameter that the passes of a context have read."""

    param: Tensor
    leaf: Tensor
    version: int
    lease: Lease


_READS: dict[int, dict[int, _ReadRecord]] = {}
"""Records by the id of the context and the id of the parameter. Protected by ``LOCK``."""


def read(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the versions that the current context reads; its first read of a parameter fixes them.

    Outside of a context, return the current versions, which require no gradient.
    """
    context_id = current_context_id()
    with LOCK.acquire(_READS):
        for closed in [one for one in _READS if not is_valid_context(one)]:
            del _READS[closed]
        kept = {} if context_id is None else _READS.setdefault(context_id, {})
        # A lease is given back by the step: passes after the step read a new version.
        new = [
            one for one in params.values() if id(one) not in kept or kept[id(one)].lease.given_back
        ]
        # One lease for each parameter: optimizers may step different parameters.
        versions, leases = param_versions(new), [Lease() for _ in new]
        made = read_all(new, versions, leases)
        for param, one, leaf, lease in zip(new, versions, made, leases, strict=True):
            kept[id(param)] = _ReadRecord(param, leaf, one.number, lease)
        found = {name: kept[id(param)].leaf for name, param in params.items()}
    if context_id is None:
        return {name: leaf.requires_grad_(False) for name, leaf in found.items()}
    return found


class ContextExchange(Exchange):
    """Exchange with gradients of a context of this process, and readers that get copies.

    A worker without a part in the forward pass has no context, and so no gradients. A source that
    is no id of a context is the list of gradients.
    """

    def gradients(self, source: Any, params: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of parameters, or of the versions that passes have read."""
        if not isinstance(source, int):
            pairs = zip(source, params, strict=True)
            return [grad if grad is None else grad.to(param.device) for grad, param in pairs]
        if not is_valid_context(source):
            return [None] * len(params)
        found = dist_autograd.get_gradients(source)
        by_id = dict(zip(map(id, found), found.values(), strict=True))
        kept = _READS.get(source)
        if not kept:
            return [*map(by_id.get, map(id, params))]
        grads = []
        for place, param in enumerate(params):
            grad, known = by_id.get(id(param)), kept.get(id(param))
            of_leaf = None if known is None else by_id.get(id(known.leaf))
            if grad is not None and of_leaf is not None:
                raise RuntimeError(
                    f"parameter {place} of this worker, of shape {tuple(param.shape)}, was read in "
                    f"context {source} through a SnapshotModule and without one; read it in one of "
                    "these ways"
                )
            grads.append(of_leaf if grad is None else grad)
        return grads

    def versions_read(self, source: Any, params: Sequence[Tensor]) -> list[int | None] | None:
        """Return the versions that the passes of a context read through a SnapshotModule."""
        kept = _READS.get(source) if isinstance(source, int) else None
        if not kept:
            return None
        found = [kept.get(id(param)) for param in params]
        return [None if one is None else one.version for one in found]

    def release(self, source: Any, params: Sequence[Tensor]) -> None:
        """Give back the versions of these parameters that the passes of a context read."""
        kept = _READS.get(source, {}) if isinstance(source, int) else {}
        for one in filter(None, [kept.get(id(param)) for param in params]):
            if not one.lease.given_back:
                # A later backward pass through the leaf raises, as after any write in place.
                torch.autograd.graph.increment_version(one.leaf)
                one.lease.given_back = True

    def read(self, params: Sequence[Tensor], versions: Sequence[Versions]) -> Reading:
        """Return copies in one buffer."""
        made = pack(params)
        return Reading(made, None, made.data.numel())
