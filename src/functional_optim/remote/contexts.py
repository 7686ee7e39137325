"""Gradients of distributed autograd, and the versions of parameters that its passes began with."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import autograd as dist_autograd

from functional_optim._torch import current_context_id, is_valid_context
from functional_optim.remote.exchange import Handed
from functional_optim.remote.snapshot import packed
from functional_optim.remote.turn import Turn
from functional_optim.remote.versions import Lease, Versions, leaves, versions_of

TURN = Turn()
"""One for the process: several optimizers here may have the same parameters."""


class _Kept(NamedTuple):
    """Record of what the passes of a context read of a parameter."""

    param: Tensor
    leaf: Tensor
    number: int
    """The step at which it was read."""
    lease: Lease


_KEPT: dict[int, dict[int, _Kept]] = {}
"""By the id of the context, and by that of the parameter. Used in turn."""


def is_open(context_id: int) -> bool:
    """Return True if this process has a part in a context that is not closed yet."""
    return is_valid_context(context_id)


def read(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The version of parameters that the current context's passes have, from its first one on.

    Outside of a context, it is the version of now, which takes no gradient.

    Args:
        params: by name.
    """
    context_id = current_context_id()
    with TURN.of(_KEPT):
        _forget()
        kept = {} if context_id is None else _KEPT.setdefault(context_id, {})
        new = [one for one in params.values() if id(one) not in kept or _is_over(kept[id(one)])]
        # A lease of its own for each: an optimizer may step some of them, and another one others.
        versions, leases = versions_of(new), [Lease() for _ in new]
        made = leaves(new, versions, leases)
        for param, one, leaf, lease in zip(new, versions, made, leases, strict=True):
            kept[id(param)] = _Kept(param, leaf.tensor, one.number, lease)
        found = {name: kept[id(param)].leaf for name, param in params.items()}
    if context_id is None:
        return {name: leaf.requires_grad_(False) for name, leaf in found.items()}
    return found


def _is_over(kept: _Kept) -> bool:
    """Return True if its step was made, so that further passes begin anew."""
    return kept.lease.given_back


def _forget() -> None:
    """Forget the records of closed contexts."""
    for context_id in [one for one in _KEPT if not is_open(one)]:
        del _KEPT[context_id]


class InContexts:
    """Gradients are those of a context of this process, and readers are sent copies.

    A worker that had no part in a forward pass has no context of it, and no gradients. A source
    that is no context's id is the gradients themselves.
    """

    def gradients(self, source: Any, params: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of parameters, and of the versions that passes read.

        Raises:
            RuntimeError: passes of this context read a parameter, and a version of it too.
        """
        if not isinstance(source, int):
            pairs = zip(source, params, strict=True)
            return [grad if grad is None else grad.to(param.device) for grad, param in pairs]
        if not is_open(source):
            return [None] * len(params)
        found = dist_autograd.get_gradients(source)
        by_id = dict(zip(map(id, found), found.values(), strict=True))
        kept = _KEPT.get(source)
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

    def numbers(self, source: Any, params: Sequence[Tensor]) -> list[int | None] | None:
        """The steps at which the passes of a context read parameters through a SnapshotModule."""
        kept = _KEPT.get(source) if isinstance(source, int) else None
        if not kept:
            return None
        found = [kept.get(id(param)) for param in params]
        return [None if one is None else one.number for one in found]

    def done(self, source: Any, params: Sequence[Tensor]) -> None:
        """Give back what its passes read of these parameters."""
        kept = _KEPT.get(source, {}) if isinstance(source, int) else {}
        for one in filter(None, [kept.get(id(param)) for param in params]):
            if not one.lease.given_back:
                # A backward pass through it raises from here on, as after any change in place.
                torch.autograd.graph.increment_version(one.leaf)
                one.lease.given_back = True

    def handed(self, params: Sequence[Tensor], versions: Sequence[Versions]) -> Handed:
        """Copies, in one buffer."""
        made = packed(params)
        return Handed(made, None, made.data.numel())
