"""Tests that compare each front-end with torch, on one rank in this process."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hooks.demo import text
from hooks.demo.front_ends import FRONT_ENDS, LocalSGD, StepHook, TorchAdamW, ZeroStepHook
from hooks.demo.model import Decoder
from hooks.demo.run import ComparedRun, DemoRun, HyperParameters, compare, tensor_bytes
from hooks.demo.settings import Settings


def batches(count: int, tokens: int, context: int) -> Iterator[text.Batch]:
    chance = torch.Generator().manual_seed(3)
    stream = torch.randint(tokens, (500,), generator=chance)
    for _ in range(count):
        yield text.random_batch(stream, 2, context, chance)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("tried", [StepHook, ZeroStepHook, partial(LocalSGD, period=2)])
def test_it_gives_what_torch_gives_to_the_last_bit(tried: Callable[..., DemoRun]) -> None:
    hyper = HyperParameters(Settings(steps=12).learning_rate)
    runs = []
    for make in (tried, TorchAdamW):
        torch.manual_seed(0)
        model = Decoder(30, context=8, width=24, heads=2, blocks=1)
        runs.append(make(ComparedRun("", "", make, exact=True), model, hyper))
    begin = runs[0].flat_parameters()
    for batch in batches(4, 30, 8):
        for run in runs:
            run.step(batch)
    ours, by_torch = runs
    assert not compare(begin, ours.flat_parameters()).same_bits
    assert compare(ours.flat_parameters(), by_torch.flat_parameters()).same_bits
    assert ours.losses == by_torch.losses
    assert ours.gradient_bytes == 4 * len(begin)
    assert ours.sent_bytes(100.0, 3) == by_torch.sent_bytes(100.0, 3) == 300
    # AdamW has two averages of the parameters' size, and a few step counts.
    assert 8 * len(begin) <= ours.state_bytes() <= 8 * len(begin) + 1000
    assert 8 * len(begin) <= by_torch.state_bytes() <= 8 * len(begin) + 1000


class _CountBuckets(DemoRun):
    """Front-end that only records the index of each bucket."""

    def __init__(self, spec: ComparedRun, model: nn.Module) -> None:
        super().__init__(spec, model)
        self.seen: list[int] = []
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(None, self._hook)

    def _hook(self, state: None, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        self.seen.append(bucket.index())
        done: Future[torch.Tensor] = Future()
        done.set_result(bucket.buffer())
        return done

    def state_bytes(self) -> int:
        return 0


@pytest.mark.usefixtures("world_of_one")
def test_the_model_is_stepped_in_several_buckets() -> None:
    way = ComparedRun("", "", _CountBuckets, exact=True)
    model = Decoder(95)
    run = _CountBuckets(way, model)
    for batch in batches(2, 95, model.context):
        run.step(batch)
    assert max(run.seen) >= 3


def test_memory_that_is_shared_counts_once_and_whole() -> None:
    flat = torch.zeros(100)
    assert tensor_bytes([]) == tensor_bytes([torch.empty(0)]) == 0
    assert tensor_bytes([flat[:10], flat[5:20].view(3, 5), flat]) == 400
    assert tensor_bytes([flat[:10], torch.zeros(3, dtype=torch.float64)]) == 424


def test_sums_in_rank_order_are_those_of_an_all_reduce_for_two_ranks() -> None:
    for ranks, exact in ((1, True), (2, True), (3, False), (16, False)):
        found = FRONT_ENDS["step-hook"](ranks)
        assert [(way.name, way.exact) for way in found] == [("A", True), ("B", True), ("C", exact)]
