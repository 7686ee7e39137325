"""Optimizers as values: hashed, compared, copied, pickled, shared between threads."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from functional_optim import (
    Optimizer,
    State,
    adam,
    adamw,
    chain,
    clip_by_global_norm,
    clip_by_value,
    decoupled_weight_decay,
    sgd,
    weight_decay,
)
from tests.choices import each_value

from .support import EVERY, assert_same, noise, steps


def half(made: float) -> float:
    """Return a falling rate, as a schedule that pickle can save."""
    return 0.5 / (1 + made)


def is_bias(path: tuple[Any, ...]) -> bool:
    """Return True for a bias, as a predicate that pickle can save."""
    return path[-1] == "bias"


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


COPIES: tuple[Callable[[Any], Any], ...] = (by_pickle, copy.deepcopy)


@each_value(optimizer=EVERY, made=COPIES)
def test_copies_are_equal_and_step_alike(optimizer: Optimizer, made: Callable[[Any], Any]) -> None:
    other = made(optimizer)
    assert other == optimizer
    assert (hash(other), str(other)) == (hash(optimizer), str(optimizer))
    assert_same(
        *(steps(one, noise(0, 3), lambda index: noise(index, 3), 2) for one in (other, optimizer))
    )


@each_value(made=COPIES)
def test_so_they_are_with_schedules_and_overrides(made: Callable[[Any], Any]) -> None:
    optimizer = (
        adamw(half)
        .override(("a",), lr=0.1)
        .override(is_bias, weight_decay=0.0)
        .using(executor="blocked", namespace="n")
    )
    assert (made(optimizer), hash(made(optimizer))) == (optimizer, hash(optimizer))
    assert made(optimizer).hypers_at(("x", "bias"))[1].weight_decay == 0.0


def test_a_state_survives_copying_and_saving(tmp_path: Path) -> None:
    optimizer, params = adam(0.1, amsgrad=True), {"a": noise(0, 3), "b": None}
    params, state = optimizer.update(params, {"a": noise(1, 3), "b": None}, optimizer.init(params))
    torch.save(state, tmp_path / "state.pt")
    for other in (by_pickle(state), copy.deepcopy(state), torch.load(tmp_path / "state.pt")):
        assert type(other) is State
        assert_same(other, state)


def test_equal_means_same_stages_and_same_numbers() -> None:
    assert sgd(0.1) == sgd(0.1)
    assert hash(sgd(0.1)) == hash(sgd(0.1))
    assert sgd(1) == sgd(1.0)
    different: list[Optimizer] = [
        sgd(0.1),
        sgd(0.2),
        sgd(0.1, maximize=True),
        sgd(0.1).using(executor="blocked"),
        sgd(0.1).using(namespace="n"),
        sgd(0.1).override(("a",), lr=0.1),
        sgd(lambda made: 0.1),
        adam(0.1),
        chain(clip_by_value(1.0), sgd(0.1)),
    ]
    assert len(set(different)) == len(different)
    assert {sgd(0.1): "value"}[sgd(0.1)] == "value"


def test_equal_optimizers_have_equal_hashes() -> None:
    """A set must not hold two equal optimizers, even if their hyper-parameters are tensors."""
    for dtype in (torch.float32, torch.float64):
        one = adam(torch.tensor(0.5, dtype=dtype))
        for other in (adam(0.5), adam(torch.tensor(0.5, dtype=dtype))):
            assert (one != other) or hash(one) == hash(other)


def test_an_optimizer_cannot_be_changed() -> None:
    optimizer = sgd(0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        optimizer.executor = "blocked"
    with pytest.raises(AttributeError):
        optimizer.links[-1].hyper.lr = 0.2


@each_value(
    make=[clip_by_global_norm, clip_by_value, weight_decay, decoupled_weight_decay], made=COPIES
)
def test_links_can_be_copied_before_they_are_chained(
    make: Callable[[float], Any], made: Callable[[Any], Any]
) -> None:
    """A link that takes the chain's lr must not rely on the identity of a marker."""
    assert chain(made(make(0.5)), sgd(0.1)) == chain(make(0.5), sgd(0.1))


def test_threads_share_an_optimizer() -> None:
    optimizer = chain(clip_by_global_norm(1.0), adamw(0.1))

    def train(seed: int) -> Any:
        return steps(optimizer, {"w": noise(seed, 5)}, lambda i: {"w": noise(seed + i, 5)}, 20)

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(train, range(8)))
    for seed, result in enumerate(together):
        assert_same(result, train(seed))
