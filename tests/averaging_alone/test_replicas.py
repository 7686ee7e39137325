"""Replicas that are stacked in one process do what ranks do."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functional_optim import Optimizer, TorchOptimizer
from hooks.averaging import ReplicatedOptimizer, StackedReplicas, at_once, one_by_one
from hooks.averaging.compression import Blocks
from hooks.averaging.rank_means import RankMeans
from hooks.averaging.stacked import StackedMeans
from sharding import ParameterSpec, plan
from sharding.transport.local import LocalWorld
from tests.choices import case, each

from .replicas import AVERAGERS, INNER, STEPS, outer, same, scheduled
from .test_averagers import DTYPES, tensors

SIZES = (2, 3, 4)
MANY = 16
SHAPES = {"matrix": (5, 3), "vector": (7,), "number": (), "none": (0, 2)}


def begin() -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=chance) for name, shape in SHAPES.items()}


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    """In the warm-up of an averager, ranks keep the same parameters."""
    chance = torch.Generator().manual_seed(0 if step == 0 else 1 + rank + 50 * step)
    return {name: torch.randn(shape, generator=chance) for name, shape in SHAPES.items()}


def by_ranks(size: int, optimizer: Optimizer, make: Callable[..., Any]) -> list[list[Tensor]]:
    """The stacked parameters after each step."""

    def run(group: Any) -> list[list[Tensor]]:
        params = {name: nn.Parameter(value) for name, value in begin().items()}
        inner = TorchOptimizer(list(params.values()), optimizer)
        averager = make(list(params.values()), group)
        seen = []
        for step in range(STEPS):
            for name, grad in gradients(group.rank(), step).items():
                params[name].grad = grad
            inner.step()
            averager.average_parameters(params.values())
            seen.append([param.detach().clone() for param in params.values()])
        return seen

    ranks = LocalWorld(size).run(run)
    return [
        [torch.stack(slices) for slices in zip(*step, strict=True)]
        for step in zip(*ranks, strict=True)
    ]


class Stacked:
    """The same, without ranks."""

    def __init__(
        self, size: int, optimizer: Optimizer, make: Callable[..., Any], over: Any
    ) -> None:
        self.size = size
        self.params = {
            name: value.expand(size, *value.shape).clone() for name, value in begin().items()
        }
        self.inner = ReplicatedOptimizer(self.params, optimizer, over=over)
        self.averager = make(self.params.values(), StackedReplicas(size))

    def step(self, step: int) -> list[Tensor]:
        grads = [gradients(rank, step) for rank in range(self.size)]
        self.inner.step({name: torch.stack([one[name] for one in grads]) for name in SHAPES})
        self.averager.average_parameters(self.params.values())
        return [param.clone() for param in self.params.values()]

    def saved(self) -> Any:
        file = io.BytesIO()
        torch.save((self.params, self.inner.state, self.averager.state_dict()), file)
        file.seek(0)
        return torch.load(file)

    def load(self, saved: Any) -> None:
        params, self.inner.state, averager = saved
        for name, value in params.items():
            self.params[name].copy_(value)
        self.averager.load_state_dict(averager)


def test_means_over_slices_have_the_bits_of_means_over_ranks() -> None:
    for size in (1, *SIZES, MANY):
        for dtype in DTYPES:
            each_ = [tensors(rank, dtype) for rank in range(size)]
            want = LocalWorld(size).run(
                lambda group, each_=each_: RankMeans(group).launch(each_[group.rank()]).wait()
            )
            stacked = [torch.stack(slices) for slices in zip(*each_, strict=True)]
            before = [one.clone() for one in stacked]
            found = StackedMeans(StackedReplicas(size), size).launch(stacked).wait()
            with case(size=size, dtype=dtype):
                for rank in range(size):
                    assert same([one[rank] for one in found], want[rank])
                assert same(stacked, before)
                assert all(one.dtype == dtype for one in found)


def test_means_of_float16_do_not_overflow() -> None:
    big = torch.full((4, 3), 60_000.0, dtype=torch.float16)
    assert torch.equal(StackedMeans(StackedReplicas(4), 4).launch([big]).wait()[0], big)


@each(averager=AVERAGERS, inner=INNER, size=SIZES)
def test_inner_steps_means_and_outer_steps_have_the_bits_of_ranks(
    averager: str, inner: str, size: int
) -> None:
    """Given the same gradients. A sum over elements has the bits of ranks if it is done alone."""
    require_same(averager, inner, size)


@each(averager=("hierarchical", "DiLoCo, streaming", "2 bits"))
def test_so_have_many(averager: str) -> None:
    require_same(averager, "AdamW", MANY)


def require_same(averager: str, inner: str, size: int) -> None:
    over = one_by_one if inner == "of whole tensors" else at_once
    want = by_ranks(size, INNER[inner], AVERAGERS[averager])
    found = Stacked(size, INNER[inner], AVERAGERS[averager], over)
    for step in range(STEPS):
        with case(step=step):
            assert same(found.step(step), want[step])


def test_a_rule_sees_one_replica_at_a_time() -> None:
    """By vmap, too: but for the rounding of a norm."""
    rule = INNER["of whole tensors"]
    at_once_, alone = (Stacked(3, rule, scheduled(3), over) for over in (at_once, one_by_one))
    for step in range(STEPS):
        for one, other in zip(at_once_.step(step), alone.step(step), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_stopped_and_loaded_is_never_stopped() -> None:
    for name in ("periodic, delayed", "DiLoCo, streaming", "2 bits", "largest"):
        arguments = (3, INNER["AdamW"], AVERAGERS[name], at_once)
        whole, first, second = (Stacked(*arguments) for _ in range(3))
        want = [whole.step(step) for step in range(STEPS)]
        for step in range(5):
            first.step(step)
        second.load(first.saved())
        with case(name=name):
            for step in range(5, STEPS):
                assert same(second.step(step), want[step])


def test_fragments_are_of_one_replicas_parameters() -> None:
    """A plan says what ranks would say, whatever the number of replicas."""
    specs = [ParameterSpec(str(k), shape) for k, shape in enumerate(SHAPES.values())]
    parts = plan(specs, 2, policy="greedy")
    for size in (1, 3):
        made = outer(fragments=parts)
        given, count = (
            Stacked(size, INNER["SGD"], one, at_once) for one in (made, outer(fragments=2))
        )
        for step in range(STEPS):
            assert same(given.step(step), count.step(step))


def test_replicas_that_part_in_the_warm_up_are_named() -> None:
    stacked = torch.ones(2, 1)
    averager = outer(warmup_steps=1)([stacked], StackedReplicas(2))
    stacked[1] += 1
    with pytest.raises(ValueError, match=r"replicas \[1\] .* the same through the warm-up"):
        averager.average_parameters()


def test_a_change_that_cannot_be_encoded_is_named_by_its_replica() -> None:
    stacked = torch.ones(3, 2)
    averager = outer(period=1, compression=Blocks(8))([stacked], StackedReplicas(3))
    stacked[1, 1] = torch.inf
    with pytest.raises(ValueError, match="element 1 of 2 is -inf") as caught:
        averager.average_parameters()
    assert "of replica 1" in caught.value.__notes__
    assert averager.bytes_sent == 0
