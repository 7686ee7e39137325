"""Tests that any plan on any number of ranks gives the results of one process."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharding.transport.local import LocalWorld
from tests import checkpoints
from tests.choices import case, examples
from tests.zero_drawn.drawing import AS_DRAWN

from .trainings import OPTIMIZERS, POLICIES, Alone, Sharded, Training, World, trainings, worlds


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_plan_is_one_process_and_goes_on_as_any_other(
    optimizer: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two steps are saved on some ranks, and two more steps follow on other ranks.

    A checkpoint and a state dict each continue as one process does.
    """

    @examples(2, **AS_DRAWN)
    @given(
        trainings(optimizer),
        worlds(optimizer),
        worlds(optimizer, "thin slices" if optimizer != "int8" else "elements"),
        worlds(optimizer, "nodes", 4),
    )
    def law(training: Training, first: World, then: World, other: World) -> None:
        folder = tmp_path_factory.mktemp("saved")
        twins = [Alone(training) for _ in range(3)]
        for twin, steps in zip(twins, (range(2), range(3), range(4)), strict=True):
            for step in steps:
                twin.step(step)
        begun, third, fourth = twins

        def trains(group: Any) -> tuple[Any, str]:
            one = Sharded(training, first, group)
            start = Alone(training)
            start.step(0)
            one.step(0, start)
            one.step(1, begun)
            one.check_state(begun)
            found = one.zero.state_dict() if group.rank() == group.size() - 1 else None
            one.save(folder)
            return found, one.digest()

        saved = LocalWorld(first.ranks).run(trains)
        assert len({told for _, told in saved}) == 1

        def goes_on(group: Any, given: Any, world: World) -> None:
            one = Sharded(training, world, group)
            one.start_from(begun.params)
            checkpoints.load(one.zero, folder) if given is None else one.zero.load_state_dict(given)
            one.step(2, third)
            one.step(3, fourth)
            one.check_state(fourth)

        with case(way="files"):
            LocalWorld(then.ranks).run(lambda group: goes_on(group, None, then))
        with case(way="state dict"):
            LocalWorld(other.ranks).run(lambda group: goes_on(group, saved[-1][0], other))

    law()


@examples(6, **AS_DRAWN)
@given(trainings("adamw"), worlds("adamw", most=16))
def test_each_element_has_one_owner(training: Training, world: World) -> None:
    """Each element has exactly one owner in each replica."""

    def owned(group: Any) -> list[Any]:
        zero = Sharded(training, world, group).zero
        assert zero.plan.shard_rank(group.rank()) < zero.plan.shard_ranks
        return [(one.path, one.start, one.stop) for one in zero.owned], zero.plan.replicas

    ranks = LocalWorld(world.ranks).run(owned)
    copies = ranks[0][1]
    for number, shape in enumerate(training.shapes):
        spans = sorted(span for own, _ in ranks for span in own if span[0] == f"p{number}")
        assert all(spans.count(span) == copies for span in spans)
        ends = [0]
        for _, start, stop in sorted(set(spans)):
            assert start == ends[-1]
            ends.append(stop)
        assert ends[-1] == torch.Size(shape).numel()


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_clipped_as_by_torch(policy: str) -> None:
    """Each rank measures only what it owns, but all ranks get the norm of all gradients."""
    order = st.sampled_from([2.0, 1.0, 3.0, math.inf])
    odd = st.sampled_from([None, math.nan, math.inf])

    @examples(2, **AS_DRAWN)
    @given(trainings("sgd"), worlds("sgd", most=4), order, st.sampled_from([0.01, 1e9]), odd)
    def law(training: Training, drawn: World, order: float, most: float, odd: float | None) -> None:
        world = drawn._replace(policy=policy)

        def norm(group: Any) -> str:
            return clipped(Sharded(training, world, group), training, order, most, odd)

        assert len(set(LocalWorld(world.ranks).run(norm))) == 1

    law()


def clipped(one: Sharded, training: Training, order: float, most: float, odd: float | None) -> str:
    """Clip on one rank, compare with torch, and return the norm."""
    twins = []
    for param, grad in zip(one.params.values(), training.grads(0).values(), strict=True):
        if grad is not None and odd is not None and grad.numel():
            grad.view(-1)[-1] = odd
        param.grad = grad
        twin = param.detach().clone()
        twin.grad = None if grad is None or not grad.numel() else grad.clone()
        twins.append(twin)
    norm = one.zero.clip_grad_norm_(most, order)
    wanted = torch.nn.utils.clip_grad_norm_(twins, most, order, foreach=False)
    close = {"rtol": 1e-5, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(norm.double(), wanted.double(), **close)
    for param, twin in zip(one.params.values(), twins, strict=True):
        if twin.grad is not None:
            torch.testing.assert_close(param.grad, twin.grad, **close)
    if not math.isfinite(float(norm)):
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            one.zero.clip_grad_norm_(most, order, error_if_nonfinite=True)
    return str(float(norm))
