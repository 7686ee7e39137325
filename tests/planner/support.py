"""Shapes of real models, strategies for other models, and helpers for tests of plans."""

import math
from itertools import count, pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.sharded_balance import EMBEDDING
from benchmarks.sharded_balance import MODELS as SHAPES
from benchmarks.workloads import GPT2, RESNET50
from sharding import POLICIES, ParameterSpec, ShardPlan, plan
from sharding.pieces import pieces_of

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)


MODELS = {
    name: [ParameterSpec(str(place), shape) for place, shape in enumerate(shapes())]
    for name, shapes in SHAPES.items()
}

TORCH = {
    (GPT2, 2): 1.00,
    (GPT2, 8): 2.48,
    (GPT2, 64): 19.9,
    (RESNET50, 64): 5.9,
    (EMBEDDING, 2): 1.95,
    (EMBEDDING, 8): 7.8,
    (EMBEDDING, 64): 62.0,
}
"""Measured imbalance of torch's own partition: elements of the largest rank over the mean."""


def of_sizes(*sizes: int, **fields: Any) -> list[ParameterSpec]:
    """Return vectors of these sizes, named p0, p1, ..."""
    return [ParameterSpec(f"p{place}", (size,), **fields) for place, size in enumerate(sizes)]


@st.composite
def specs(
    draw: st.DrawFn, *, most: int = 12, largest: int = 40, matrices: bool = False
) -> list[ParameterSpec]:
    """Draw parameters of any kind: empty, 0-d, frozen, of several dtypes and groups."""
    number = count()
    side = math.isqrt(largest)
    one = st.builds(
        lambda shape, dtype, device, trained, kind, group: ParameterSpec(
            f"p{next(number)}", shape, dtype, device, trained, kind, group
        ),
        st.one_of(
            st.just(()),
            st.tuples(st.integers(0, largest)),
            st.tuples(st.integers(0, side), st.integers(1, side)),
        ),
        st.sampled_from(DTYPES),
        st.sampled_from(["cpu", "cuda"]),
        st.booleans(),
        st.sampled_from(["pointwise", "per_matrix"] if matrices else ["pointwise"]),
        st.integers(0, 2),
    )
    return draw(st.lists(one, max_size=most))


@st.composite
def scattered(draw: st.DrawFn, parameters: list[ParameterSpec], ranks: int) -> ShardPlan:
    """Draw a plan that no policy makes. A rank may have several ranges of one parameter."""
    owner = st.integers(0, ranks - 1)
    rows = []
    for index, spec in enumerate(parameters):
        may_cut = spec.kind == "pointwise" and spec.numel > 0
        cuts = draw(st.sets(st.integers(0, spec.numel), max_size=6)) if may_cut else set()
        ends = sorted(cuts | {0, spec.numel})
        pairs = pairwise(ends) if spec.numel else [(0, 0)]
        rows += [(index, start, stop, draw(owner)) for start, stop in pairs]
    return ShardPlan(ranks, tuple(parameters), pieces_of(rows), "greedy")


@st.composite
def any_plan(draw: st.DrawFn, parameters: list[ParameterSpec]) -> ShardPlan:
    """Draw a plan of a random policy, or of none, over a random number of ranks."""
    name = draw(st.sampled_from(["", *sorted(POLICIES)]))
    ranks = draw(st.integers(1, 9))
    if not name:
        return draw(scattered(parameters, ranks))
    options: dict[str, Any] = {}
    if name == "elements":
        options = {"mixed": True, "align": draw(st.sampled_from([None, 1, 3, 8]))}
    if name == "sliced":
        options = {
            "mixed": True,
            "least": draw(st.integers(1, 9)),
            "align": draw(st.integers(1, 3)),
        }
    if name == "hierarchical":
        within = draw(
            st.sampled_from(["largest_first", "elements", "greedy", "sliced", "two_resource"])
        )
        options = {"node_size": draw(st.integers(1, 4)), "within": within}
        options |= {"mixed": True} if within in ("elements", "sliced") else {}
        ranks = options["node_size"] * draw(st.integers(1, 3))
    return plan(parameters, ranks, name, **options)


def values(spec: ParameterSpec, seed: int = 0) -> Tensor:
    """Return flat values for a parameter that differ for all elements of all parameters."""
    start = seed + 1000 * int(spec.path.removeprefix("p"))
    return torch.arange(start, start + spec.numel)


def sharded(plan: ShardPlan, tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the elements of each rank by a plan. Ranges of one parameter are joined."""
    held: list[dict[str, Tensor]] = []
    for rank in range(plan.world_size):
        mine: dict[str, Tensor] = {}
        for one in plan.owned(rank):
            part = tensors[one.path][one.start : one.stop]
            mine[one.path] = torch.cat([mine[one.path], part]) if one.path in mine else part
        held.append(mine)
    return held
