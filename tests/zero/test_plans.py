"""Tests that step plans are built once, reused in later steps, and change no bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functional_optim import Optimizer, adamw, sgd, stored
from functional_optim.core.state import state_tensors
from functional_optim.plan import StepPlan
from functional_optim.storage import layout, pieces
from sharding import ZeroRedundancyOptimizer
from tests.choices import each
from tests.zero_local.compare import differing

pytestmark = pytest.mark.usefixtures("world_of_one")

SHAPES = {"a": (600,), "b": (), "c": (30, 7), "d": (0,), "e": (513,)}
CHAINS: dict[str, Optimizer] = {
    "adamw": adamw(lr=0.1),
    "momentum": sgd(lr=0.1, momentum=0.9),
    "eight bits": stored(adamw(lr=0.1), state="int8"),
}


def values(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()
    }


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of ranges of each step plan."""
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 1)
    made: list[int] = []
    before = StepPlan.__init__

    def noted(
        self: StepPlan, stages: Any, executor: Any, items: Any, *more: Any, **other: Any
    ) -> None:
        made.append(len(items))
        before(self, stages, executor, items, *more, **other)

    monkeypatch.setattr(StepPlan, "__init__", noted)
    return made


@each("name", name=CHAINS, views=[False, True], executor=["auto", "blocked"])
def test_a_steady_iteration_plans_nothing(
    name: str, views: bool, executor: str, planned: list[int]
) -> None:
    """Steady iterations reuse one plan per bucket, though each step passes the gradients again."""
    planned.clear()
    optimizer = CHAINS[name]
    params, state = values(1), optimizer.init(values(1))
    reference = optimizer.using(executor="reference")
    zero = ZeroRedundancyOptimizer(
        [(path, nn.Parameter(one.clone())) for path, one in params.items()],
        optimizer,
        parameters_as_bucket_view=views,
        overlap_with_ddp=True,
        executor=executor,
    )
    memory = values(0)
    flat = {path: one.view(-1) for path, one in memory.items()}
    whole = {path: [(0, one.numel(), one)] for path, one in flat.items()}
    buckets = [
        {"e": whole["e"], "d": whole["d"]},
        {"a": whole["a"], "b": whole["b"], "c": [(0, 210, memory["c"])]},
    ]
    for seed in range(6):
        for path, one in values(10 + seed).items():
            memory[path].copy_(one)
        rate = zero.param_groups[0]["lr"] = 0.1 / (seed + 1)
        zero.begin_iteration()
        for bucket in buckets:
            zero.step_owned(dict(bucket))
        zero.end_iteration()
        params, state = reference.update(params, memory, state, lr=rate)
        assert differing({path: one.detach() for path, one in zero.params.items()}, params) == []
        made = [int(entries["step"]) for entries in zero.optim.state.values()]
        assert made == [seed + 1] * len(SHAPES)
    assert planned == [2, 3]


def test_sets_of_gradients_in_turn_have_a_plan_each(planned: list[int]) -> None:
    """Sets of gradients that alternate, as with experts, have one plan each.

    Turning an option off adds plans, and turning it on again reuses the first plans.
    """
    named = [
        [(path, nn.Parameter(one)) for path, one in values(1).items() if one.numel()]
        for _ in range(2)
    ]
    options = {"lr": 0.1, "momentum": 0.9}
    zero = ZeroRedundancyOptimizer(named[0], torch.optim.SGD, **options)
    other = torch.optim.SGD([param for _, param in named[1]], **options, foreach=False)
    for momentum, made in ((0.9, [4, 2, 1, 4]), (0.0, [4, 2, 1]), (0.9, [])):
        planned.clear()
        for seed in range(9):
            chosen = ["abce", "ae", "c"][seed % 3]
            drawn = values(seed)
            for optimizer, params in zip((zero, other), named, strict=True):
                optimizer.param_groups[0]["momentum"] = momentum
                for path, param in params:
                    param.grad = drawn[path] if path in chosen else None
                optimizer.step()
            ours, theirs = ({path: one.detach() for path, one in params} for params in named)
            assert differing(ours, theirs) == []
        # The first plan has all parameters at one step count. The counts then differ, so that a new
        # plan is built. The plans of the first option are still cached at the end.
        assert planned == made


def test_the_state_of_a_large_shard_is_made_some_blocks_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Encoded state is initialized in float32 by pieces, never for the whole shard at once."""
    asked: list[int] = []

    def noted(init: Any, param: Tensor, block_size: int) -> Any:
        def init_piece(piece: Tensor) -> Any:
            asked.append(piece.numel())
            return init(piece)

        return pieces.init_in_pieces(init_piece, param, block_size)

    monkeypatch.setattr(pieces, "PIECE", 1000)
    monkeypatch.setattr(layout, "init_in_pieces", noted)
    param = nn.Parameter(torch.linspace(-1.0, 1.0, 5000).view(50, 100))
    optimizer = CHAINS["eight bits"]
    zero = ZeroRedundancyOptimizer([param], optimizer)
    assert max(asked) <= 1024 and sum(asked) >= 5000
    want = optimizer.init({"w": param.detach()}).leaves["w"]
    made = [one for one in zero.optim.state[param].values() if one.dim()]
    for one, other in zip(made, state_tensors(want.stages), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
