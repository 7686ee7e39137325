"""Buckets of a resumed run; tests/averaging compares the sums."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future

from functional_optim import TorchOptimizer, sgd
from hooks import PeriodicModelAverager, PostLocalSGDOptimizer, PostLocalSGDState
from hooks.averaging.bucket_history import BucketHistory, SubBucket
from tests.choices import case

SIZES = {"a": 1, "b": 2, "c": 3, "d": 4}


class Seen:
    """Hook that doubles its buckets and records them."""

    def __init__(self) -> None:
        self.buckets: list[tuple[int, list[int], bool]] = []

    def __call__(self, bucket: Any) -> Future[Tensor]:
        sizes = [param.numel() for param in bucket.parameters()]
        assert bucket.buffer().numel() == sum(sizes)
        self.buckets.append((bucket.index(), sizes, bucket.is_last()))
        done: Future[Tensor] = Future()
        done.set_result(bucket.buffer().mul_(2))
        return done


def backward(found: BucketHistory[str], buckets: list[str]) -> list[tuple[int, str, bool]]:
    """Run one backward pass, with a word for each bucket; return the hook's buckets."""
    seen, names = Seen(), dict(zip(SIZES.values(), SIZES, strict=True))
    for number, keys in enumerate(buckets):
        params = [torch.full((SIZES[key],), float(SIZES[key])) for key in keys]
        bucket = SubBucket(number, torch.cat(params), params, last=number == len(buckets) - 1)
        reduced = found.reduce(bucket, list(keys), seen).wait()
        assert torch.equal(reduced, 2 * torch.cat(params))
        assert reduced is bucket.buffer()
    return [
        (number, "".join(names[k] for k in sizes), last) for number, sizes, last in seen.buckets
    ]


def words(buckets: list[list[str]]) -> list[str]:
    return ["".join(keys) for keys in buckets]


def test_the_pass_after_a_resume_is_reduced_in_the_buckets_before_it() -> None:
    kept = ["d", "cb", "a"]
    for before, made, given, after in [
        (kept, ["abcd"], ["0d", "1cb", "2a"], kept),
        (kept, ["bca", "d"], ["1cb", "2a", "0d"], kept),
        (kept, kept, ["0d", "1cb", "2a"], kept),
        (kept, ["ab", "cd"], ["0ab", "1cd"], ["ab", "cd"]),  # no bucket contains all of cb
        (kept, ["ab", "c", "d"], ["0ab", "1c", "2d"], ["ab", "c", "d"]),
        (["dc", "b"], ["abcd"], ["0abcd"], ["abcd"]),  # a takes no part
        (["e", *kept], ["abcd"], ["1d", "2cb", "3a"], kept),  # e has another hook
        (kept, ["d", "ab", "c"], ["0d", "1ab", "2c"], ["d", "ab", "c"]),
        ([], ["abcd"], ["0abcd"], ["abcd"]),
    ]:
        found: BucketHistory[str] = BucketHistory()
        found.resume([list(keys) for keys in before])
        with case(before=before, made=made):
            assert words(found.buckets) == before
            seen = backward(found, made)
            assert [f"{number}{keys}" for number, keys, _ in seen] == given
            assert [last for *_, last in seen] == [False] * (len(given) - 1) + [True]
            assert words(found.buckets) == after
            assert backward(found, ["ab", "dc"]) == [(0, "ab", False), (1, "dc", True)]
            assert words(found.buckets) == ["ab", "dc"]


def test_a_second_pass_is_reduced_in_resumed_buckets_too() -> None:
    """With ``static_graph``, DDP changes its buckets after its second pass."""
    found: BucketHistory[str] = BucketHistory()
    found.resume([["d"], ["c", "b"], ["a"]])
    for given in (["d", "cb", "a"], ["d", "cb", "a"], ["abcd"]):
        assert [keys for _, keys, _ in backward(found, ["abcd"])] == given
        assert words(found.buckets) == given


def test_a_pass_that_came_to_no_end_leaves_no_trace() -> None:
    found: BucketHistory[str] = BucketHistory()

    def fails(bucket: Any) -> Future[Tensor]:
        raise RuntimeError("no such rank")

    with pytest.raises(RuntimeError, match="no such rank"):
        found.reduce(SubBucket(0, torch.ones(1), [torch.ones(1)], last=False), ["a"], fails)
    backward(found, ["bc", "a"])
    assert words(found.buckets) == ["bc", "a"]


def test_buckets_are_saved_by_the_position_of_a_parameter_in_the_optimizer(
    world_of_one: None,
) -> None:
    """Any hook of the parameters finds them; buckets with other parameters are not saved."""
    params = [nn.Parameter(torch.ones(k + 1)) for k in range(3)]
    state = PostLocalSGDState(None, None, 4)

    def optimizer(which: list[nn.Parameter]) -> PostLocalSGDOptimizer:
        return PostLocalSGDOptimizer(TorchOptimizer(which, sgd(lr=0.1)), PeriodicModelAverager(2))

    state.meet(params)
    state.iter = 3
    state.buckets.resume([[id(params[2]), id(params[0])], [id(params[1])]])
    for order, want in [
        ([0, 1, 2], [[2, 0], [1]]),
        ([2, 0, 1], [[0, 1], [2]]),
        ([0, 1], [[1]]),
    ]:
        saved = optimizer([params[k] for k in order]).state_dict()
        with case(order=order):
            assert saved["averaging"]["hook_iterations"] == 3
            assert saved["averaging"]["hook_buckets"] == want
        for hook_first in (True, False):
            others = [nn.Parameter(torch.ones_like(params[k])) for k in order]
            other = PostLocalSGDState(None, None, 4)
            if hook_first:
                other.meet(others)
            loaded = optimizer(others)
            loaded.load_state_dict(saved)
            assert loaded.state_dict()["averaging"] == saved["averaging"]
            if not hook_first:
                other.meet(others)
            with case(order=order, hook_first=hook_first):
                assert other.iter == 3
                assert other.buckets.buckets == [[id(others[k]) for k in keys] for keys in want]
                assert loaded.state_dict()["averaging"] == saved["averaging"]
