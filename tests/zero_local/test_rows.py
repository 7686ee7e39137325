"""Tests of embedding tables with FTRL and row-wise Adagrad, by dense and sparse gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functional_optim import Optimizer, adagrad, ftrl, rowwise_adagrad
from functional_optim.core.state import State
from functional_optim.core.torch_state import to_entries
from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld
from tests.choices import case

from .compare import differing, same
from .trainings import CUTTING, POLICIES, World

SHAPES = {"table": (9, 3), "wide": (6, 4, 2), "ids": (11,), "dense": (5, 3), "scalar": ()}
TABLES = ("table", "wide", "ids")
OPTIMIZERS: dict[str, Optimizer] = {
    "ftrl": ftrl(lr=0.1, l1=0.01, l2=0.02),
    "rowwise_adagrad": rowwise_adagrad(lr=0.1, weight_decay=0.1),
    "adagrad": adagrad(lr=0.1),
}
WORLDS = [(3, "reference", False), (2, "auto", True)]
"""Ranks, executor, and True if parameters are views of buckets."""
STEPS = range(4)


def chance(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def parameters() -> dict[str, nn.Parameter]:
    made = chance(0)
    return {name: nn.Parameter(torch.randn(one, generator=made)) for name, one in SHAPES.items()}


def gradients(step: int, *, sparse: bool) -> dict[str, Tensor | None]:
    """Return the gradients of a step.

    Sparse gradients repeat a row, are empty in step 2, and are coalesced in step 3.
    """
    made, found = chance(10 + step), dict[str, Tensor | None]()
    rows = torch.tensor([[] if step == 2 else [1, 4, 1, 0]], dtype=torch.int64)
    for name, shape in SHAPES.items():
        found[name] = torch.randn(shape, generator=made)
        if sparse and name in TABLES:
            values = torch.randn(rows.shape[1], *shape[1:], generator=made)
            grad = torch.sparse_coo_tensor(rows, values, shape, check_invariants=True)
            found[name] = grad.coalesce() if step == 3 else grad
    if step == 1:
        found["ids"] = None
    return found


def alone(optimizer: Optimizer, *, sparse: bool) -> tuple[list[dict[str, Tensor]], State]:
    """Return the parameters after each step and the final state of one process."""
    params: Any = {name: one.detach() for name, one in parameters().items()}
    state, found = optimizer.init(params), []
    for step in STEPS:
        params, state = optimizer.update(params, gradients(step, sparse=sparse), state)
        found.append(params)
    return found, state


def zero_of(
    optimizer: Optimizer, policy: str, world: tuple[int, str, bool], group: Any
) -> tuple[dict[str, nn.Parameter], ZeroRedundancyOptimizer]:
    ranks, executor, views = world
    params, taken = parameters(), World(ranks, policy, views).taken()
    given = list(params.items())
    zero = ZeroRedundancyOptimizer(given, optimizer, group, views, policy=taken, executor=executor)
    return params, zero


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_plan_that_leaves_tables_whole_is_one_process(name: str, sparse: bool) -> None:
    """If tables stay whole, parameters and state match one process bit for bit."""
    optimizer = OPTIMIZERS[name]
    want, state = alone(optimizer, sparse=sparse)

    def trains(group: Any, policy: str, world: tuple[int, str, bool]) -> None:
        params, zero = zero_of(optimizer, policy, world, group)
        for step in STEPS:
            for key, grad in gradients(step, sparse=sparse).items():
                params[key].grad = grad
            zero.step()
            assert differing(params, want[step]) == [], step
        zero.consolidate_state_dict(to=0)
        if group.rank() == 0:
            found = zero.state_dict()["state"]
            for number, key in enumerate(zero.params):
                hypers = optimizer.hypers_at((key,))
                entries = to_entries(optimizer.stages, hypers, params[key], state.leaves[key])
                assert int(found[number]["step"]) == int(entries.pop("step"))
                assert all(same(found[number][one], entries[one]) for one in entries), key

    for policy in POLICIES:
        for world in WORLDS:
            if sparse and policy in CUTTING and name != "rowwise_adagrad":
                continue  # these policies cut tables, see below
            with case(policy=policy, world=world):
                LocalWorld(world[0]).run(lambda group, p=policy, w=world: trains(group, p, w))


def test_a_sparse_gradient_of_a_table_that_is_cut_is_refused() -> None:
    """A sparse gradient of a cut table is refused before any step; dense gradients still work."""
    optimizer = OPTIMIZERS["ftrl"]
    want, _ = alone(optimizer, sparse=False)

    def refuses(group: Any, policy: str, world: tuple[int, str, bool]) -> None:
        params, zero = zero_of(optimizer, policy, world, group)
        for key, grad in gradients(0, sparse=True).items():
            params[key].grad = grad
        with pytest.raises(RuntimeError, match="is sparse, and the parameter is cut between ranks"):
            zero.step()
        assert differing(params, parameters()) == []
        for key, grad in gradients(0, sparse=False).items():
            params[key].grad = grad
        zero.step()
        assert differing(params, want[0]) == []

    for policy in CUTTING:
        for world in WORLDS:
            with case(policy=policy, world=world):
                LocalWorld(world[0]).run(lambda group, p=policy, w=world: refuses(group, p, w))
