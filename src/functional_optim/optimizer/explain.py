"""What an executor does with a tree of parameters, and why, in words."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.chain import Chain, require_one_chain
from functional_optim.core.forms import map_state, real_view
from functional_optim.core.initial import init_leaf
from functional_optim.core.stage import block_size_of, in_full_blocks
from functional_optim.core.tree import flatten
from functional_optim.kernels import EXECUTORS, Leaf
from functional_optim.kernels.packs import LARGE, PACK
from functional_optim.plan.item import coefficients_at


class _Alike(NamedTuple):
    """Parameters that are stepped in the same way."""

    dtype: torch.dtype
    device: torch.device
    hypers: int
    large: bool


def explain(optimizer: Chain, params: Any) -> str:
    """Which executor steps which parameters, one line for each kind of them.

    Raises:
        TypeError: leaves have different stages, or numbers in common that each step makes anew.
    """
    require_one_chain(optimizer, "explain")
    leaves, _ = flatten(params, optimizer.namespace)
    hypers = optimizer.hypers_for(params)
    found: dict[_Alike, list[tuple[Tensor, tuple[Any, ...]]]] = {}
    for leaf, own in zip(leaves, hypers, strict=True):
        if isinstance(leaf, Tensor):
            view = real_view(leaf.detach())
            alike = _Alike(view.dtype, view.device, id(own), view.numel() >= LARGE)
            found.setdefault(alike, []).append((view, own))
    return "\n".join(
        _line(optimizer, alike, [view for view, _ in members], members[0][1])
        for alike, members in found.items()
    )


def _line(optimizer: Chain, alike: _Alike, views: list[Tensor], hypers: tuple[Any, ...]) -> str:
    counts = [view.numel() for view in views]
    head = f"{len(views)} parameters, {sum(counts):,} elements of {alike.dtype} on {alike.device}"
    executor = EXECUTORS[optimizer.executor]
    by_chunks = executor.in_chunks(optimizer.stages)
    if by_chunks is None:
        return f"{head}: {executor.explain_leaves(optimizer.stages, optimizer.executor)}"
    together = "each alone" if alike.large else "packed together"
    count = max(counts) if alike.large else min(sum(counts), PACK)
    chunk = _chunk(optimizer, hypers, count, alike)
    return f"{head}, {together}: {by_chunks.explain(optimizer.stages, chunk)}"


def _chunk(optimizer: Chain, hypers: tuple[Any, ...], count: int, alike: _Alike) -> Leaf:
    """A chunk of this length with memory that is never touched."""
    block_size = block_size_of(optimizer.stages)
    count = max(in_full_blocks(count, block_size), 1)
    states = init_leaf(
        optimizer.stages, hypers, torch.empty(count, dtype=alike.dtype, device="meta")
    ).stages
    resolved, coefficients = coefficients_at(optimizer.stages, hypers, 1.0)

    def real(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=alike.device)

    param = torch.empty(count, dtype=alike.dtype, device=alike.device)
    own = tuple(map_state(real, state) for state in states)
    return Leaf(param, torch.empty_like(param), own, coefficients, "", resolved, 1.0)
