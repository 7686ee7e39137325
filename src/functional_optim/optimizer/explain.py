"""Explanations of how an executor steps a tree of parameters."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.chain import Chain
from functional_optim.core.closure_optimizer import refuse_closure
from functional_optim.core.hyper import resolve, to_floats
from functional_optim.core.leaf import needs_total
from functional_optim.core.links import stage_labels
from functional_optim.core.on_global_step import at_global_step
from functional_optim.core.overrides import LeafChain, chains_of
from functional_optim.core.stage import Stage, block_size_of, in_full_blocks
from functional_optim.core.stage_contract import call_coefficients
from functional_optim.core.state import map_state
from functional_optim.core.state_init import init_leaf
from functional_optim.core.views import real_view
from functional_optim.kernels import EXECUTORS, Executor, Leaf, in_place
from functional_optim.kernels.chunks import is_dense, is_large
from functional_optim.kernels.rounding import record_rounding
from functional_optim.plan.tree import params_of

MAX_ELEMENTS = 1 << 20
"""Maximal number of elements of the chunk in the question to kernels."""


class _Kind(NamedTuple):
    """Key of parameters that are stepped in the same way."""

    dtype: torch.dtype
    device: torch.device
    hypers: int
    large: bool
    has_gaps: bool


class ExplainedChain(NamedTuple):
    """The parameters of one chain, and the explanation of their steps."""

    chain: LeafChain
    parameters: int
    """The number of parameters."""
    lines: list[str]

    def format_chain(self, optimizer: Chain) -> str:
        """Return the chain as an expression."""
        return repr(optimizer.of_chain(self.chain)) if self.chain.stages else "freeze()"


def explain(optimizer: Chain, params: Any) -> str:
    """Return which executor steps which parameters, one line for each kind of parameter.

    If parameters differ in their stages, there is a heading for each chain. The last lines name the
    stages at which a composed optimizer waits.
    """
    parts, lines = explain_chains(optimizer, params), list[str]()
    is_one = len({part.chain.places for part in parts}) < 2
    for part in parts:
        own = part.lines if is_one else [f"  {line}" for line in part.lines]
        lines += own if is_one else [part.format_chain(optimizer), *own]
    return "\n".join([*lines, *waiting_lines(optimizer)])


def waiting_lines(optimizer: Chain) -> list[str]:
    """Return a line for each stage at which a step of a composed optimizer waits, and for what."""
    if not optimizer.is_composed:
        return []
    return [
        f"a step waits at {label}: {why}"
        for label, stage in zip(stage_labels(optimizer.stages), optimizer.stages, strict=True)
        if (why := _why_waiting(stage)) is not None
    ]


def _why_waiting(stage: Stage) -> str | None:
    if stage.gate is not None:
        return "it is a gate, which decides if the stages after it run"
    total = ", from a total over the parameters" if needs_total(stage) else ""
    if stage.combine is not None:
        return f"it computes scalars that all parameters share{total}"
    return "it needs a total over the parameters" if total else None


def explain_chains(
    optimizer: Chain, params: Any, executor: str | None = None
) -> list[ExplainedChain]:
    """Return which executor steps which parameters, for each chain of an optimizer."""
    refuse_closure(optimizer, "explain")
    leaves, spec, _ = params_of(optimizer, params)
    chains = chains_of(optimizer.links, optimizer.overrides, spec, leaves)
    found: dict[int, tuple[LeafChain, list[tuple[Tensor, tuple[Any, ...]]]]] = {}
    for leaf, chain in zip(leaves, chains, strict=True):
        if leaf is not None:
            found.setdefault(id(chain), (chain, []))[1].append((leaf, chain.hypers))
    every = [stage for chain, _ in found.values() for stage in chain.stages]
    tensors = [leaf for leaf in leaves if leaf is not None]
    name = in_place(executor or optimizer.executor, tensors, every)
    return [
        ExplainedChain(chain, len(members), chain_lines(chain.stages, name, members))
        for chain, members in found.values()
    ]


def chain_lines(
    stages: Sequence[Stage],
    executor: str,
    leaves: Sequence[tuple[Any, tuple[Any, ...]]],
    step: float = 1.0,
) -> list[str]:
    """Return which executor steps leaves with one chain, and why, one line for each kind of leaf.

    If the chain has gates, the lines are about a step in which all are open.
    """
    found: dict[_Kind, list[tuple[Tensor, tuple[Any, ...]]]] = {}
    for leaf, own in leaves:
        if isinstance(leaf, Tensor):
            view = real_view(leaf.detach())
            kind = _Kind(view.dtype, view.device, id(own), is_large(view), _has_gaps(view))
            found.setdefault(kind, []).append((view, own))
    joined: dict[_Kind, int] = {}
    for kind, members in found.items():
        key = kind._replace(large=False)
        joined[key] = joined.get(key, 0) + sum(view.numel() for view, _ in members)
    return [
        _line(stages, executor, kind, members, joined[kind._replace(large=False)], step)
        for kind, members in found.items()
    ]


def _line(
    stages: Sequence[Stage],
    name: str,
    kind: _Kind,
    members: Sequence[tuple[Tensor, tuple[Any, ...]]],
    joined: int,
    step: float,
) -> str:
    """Return the line of some parameters.

    ``joined`` is the number of elements that one loop over pointers would step.
    """
    views, hypers = [view for view, _ in members], members[0][1]
    counts = [view.numel() for view in views]
    head = f"{len(views)} parameters, {sum(counts):,} elements of {kind.dtype} on {kind.device}"
    if not stages:
        return f"{head}: frozen"
    executor = EXECUTORS[name]
    if executor.in_chunks(stages) is not None:  # this may change once rounding is known
        record_rounding(stages, _chunk(stages, hypers, 1, kind, step))
    by_chunks = executor.in_chunks(stages)
    if by_chunks is None:
        like = None
        if kind.device.type == "cpu":
            like = partial(_element, stages, hypers, views[0], step)
        return f"{head}: {executor.explain_leaves(stages, name, like, joined)}"
    if kind.has_gaps:
        return f"{head}, one by one: reference; their memory has gaps"
    together = "each alone" if kind.large else "together"
    count = max(counts) if kind.large else sum(counts)
    if by_chunks.joins and kind.device.type == "cpu":
        count = joined
    # All large chunks have the same kernel, so a smaller chunk is enough.
    chunk = _chunk(stages, hypers, min(count, MAX_ELEMENTS), kind, step)
    listed = len(views) > 1 and by_chunks.may_list(stages, views[:1])
    return f"{head}, {together}: {by_chunks.explain(stages, chunk, listed=listed)}"


def _has_gaps(param: Tensor) -> bool:
    """Return True for a part of a larger tensor; False for a stand-in with one address."""
    return not is_dense(param) and 0 not in param.stride()


def explain_chunk(
    stages: Sequence[Stage], name: str, executor: Executor, chunk: Leaf, count: int
) -> str:
    """Return the line of a chunk, which has the coefficients of a first step."""
    by_chunks, param = executor.in_chunks(stages), chunk.param
    how = executor.explain_leaves(stages, name)
    if by_chunks is not None:
        how = by_chunks.explain(stages, chunk)
    return f"{chunk.name}: {count:,} elements of {param.dtype} on {param.device}: {how}"


def _chunk(
    stages: Sequence[Stage], hypers: tuple[Any, ...], count: int, kind: _Kind, step: float
) -> Leaf:
    """Return a chunk of this length with uninitialized memory."""
    block_size = block_size_of(stages)
    count = max(in_full_blocks(count, block_size), 1)
    states = init_leaf(stages, hypers, torch.empty(count, dtype=kind.dtype, device="meta")).stages
    resolved, coefficients = _first_coefficients(stages, hypers)

    def real(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=kind.device)

    param = torch.empty(count, dtype=kind.dtype, device=kind.device)
    own = tuple(map_state(real, state) for state in states)
    return Leaf(param, torch.empty_like(param), own, coefficients, "", resolved, step)


def _element(stages: Sequence[Stage], hypers: tuple[Any, ...], like: Tensor, step: float) -> Leaf:
    """Return a leaf of one element, with the dtypes of a parameter's state."""
    states = init_leaf(stages, hypers, torch.empty_like(like, device="meta")).stages
    resolved, coefficients = _first_coefficients(stages, hypers)

    def element(tensor: Tensor) -> Tensor:
        return torch.zeros(1, dtype=tensor.dtype, device="cpu")

    own = tuple(map_state(element, state) for state in states)
    return Leaf(element(like), element(like), own, coefficients, "", resolved, step)


def _first_coefficients(
    stages: Sequence[Stage], hypers: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the hyper-parameters and coefficients of the first step."""
    resolved, found = [], []
    for stage, hyper in zip(stages, hypers, strict=True):
        own = at_global_step(hyper, 1.0)
        own = resolve(stage.name, stage.bounds, stage.check, own, 1.0)
        shared = () if stage.combine is None else (stage.init_shared(own),)
        resolved.append(own)
        found.append(to_floats(call_coefficients(stage, 1.0, own, *shared)))
    return tuple(resolved), tuple(found)
