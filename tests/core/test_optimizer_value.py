"""An Optimizer is a value: hashed, compared, copied, pickled, printed, shared between threads."""

import copy
import dataclasses
import pickle
from concurrent.futures import ThreadPoolExecutor
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

from .support import CHAINS, VARIANTS, assert_same, noise, steps

EVERY = {**VARIANTS, **CHAINS}


def half(made: float) -> float:
    """A schedule that can be pickled."""
    return 0.5 / (1 + made)


def is_bias(path: tuple[Any, ...]) -> bool:
    """A predicate that can be pickled."""
    return path[-1] == "bias"


@pytest.mark.parametrize("name", EVERY)
def test_copies_are_equal_and_step_alike(name: str) -> None:
    optimizer = EVERY[name]
    for other in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert other == optimizer
        assert hash(other) == hash(optimizer)
        assert str(other) == str(optimizer)
        params = noise(0, 3)
        assert_same(
            steps(other, params, lambda index: noise(index, 3)),
            steps(optimizer, params, lambda index: noise(index, 3)),
        )


def test_variants_survive_pickling() -> None:
    optimizer = (
        adamw(half)
        .override(("a",), lr=0.1)
        .override(is_bias, weight_decay=0.0)
        .using(executor="script", namespace="n")
    )
    other = pickle.loads(pickle.dumps(optimizer))
    assert other == optimizer
    assert hash(other) == hash(optimizer)
    assert other.hypers_at(("x", "bias"))[1].weight_decay == 0.0


def test_a_state_survives_pickling_and_saving(tmp_path: Any) -> None:
    optimizer, params = adam(0.1, amsgrad=True), {"a": noise(0, 3), "b": None}
    params, state = optimizer.update(params, {"a": noise(1, 3), "b": None}, optimizer.init(params))
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=False)
    for other in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state), loaded):
        assert type(other) is State
        assert_same(other, state)
        assert_same(
            optimizer.update(params, params, other), optimizer.update(params, params, state)
        )


def test_equal_means_same_stages_and_same_numbers() -> None:
    assert sgd(0.1) == sgd(0.1)
    assert hash(sgd(0.1)) == hash(sgd(0.1))
    assert sgd(1) == sgd(1.0)
    different: list[Optimizer] = [
        sgd(0.1),
        sgd(0.2),
        sgd(0.1, maximize=True),
        sgd(0.1).using(executor="script"),
        sgd(0.1).using(namespace="n"),
        sgd(0.1).override(("a",), lr=0.1),
        sgd(lambda made: 0.1),
        adam(0.1),
        chain(clip_by_value(1.0), sgd(0.1)),
    ]
    assert len(set(different)) == len(different)
    assert {sgd(0.1): "value"}[sgd(0.1)] == "value"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_optimizers_have_equal_hashes(dtype: torch.dtype) -> None:
    """Whatever a tensor is taken to equal, a set must not hold two equal optimizers."""
    one, two = adam(torch.tensor(0.5, dtype=dtype)), adam(0.5)
    assert (one != two) or hash(one) == hash(two)
    same = adam(torch.tensor(0.5, dtype=dtype))
    assert (one != same) or hash(one) == hash(same)


def test_an_optimizer_cannot_be_changed() -> None:
    optimizer = sgd(0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        optimizer.executor = "script"
    with pytest.raises(AttributeError):
        optimizer.links[-1].hyper.lr = 0.2


def test_str_shows_the_chain_the_numbers_and_the_executor() -> None:
    optimizer = chain(clip_by_value(2.0), sgd(0.1, momentum=0.5)).using(executor="script")
    assert str(optimizer) == (
        "maximize(maximize=False) -> clip_by_value(clip_value=2.0) -> "
        "weight_decay(weight_decay=0.0) -> "
        "sgd(lr=0.1, momentum=0.5, dampening=0.0, nesterov=False) [script]"
    )


LINKS = {
    "clip_by_global_norm": clip_by_global_norm(0.5),
    "clip_by_value": clip_by_value(0.5),
    "weight_decay": weight_decay(0.5),
    "decoupled_weight_decay": decoupled_weight_decay(0.5),
}


@pytest.mark.parametrize("name", LINKS)
def test_links_can_be_copied_before_they_are_chained(name: str) -> None:
    """One that takes the chain's lr has to know it by more than the identity of a mark."""
    wanted = chain(LINKS[name], sgd(0.1))
    assert chain(copy.deepcopy(LINKS[name]), sgd(0.1)) == wanted
    assert chain(pickle.loads(pickle.dumps(LINKS[name])), sgd(0.1)) == wanted


def test_threads_share_an_optimizer() -> None:
    optimizer = chain(clip_by_global_norm(1.0), adamw(0.1))

    def train(seed: int) -> Any:
        return steps(optimizer, {"w": noise(seed, 5)}, lambda i: {"w": noise(seed + i, 5)}, 20)

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(train, range(8)))
    for seed, result in enumerate(together):
        assert_same(result, train(seed))
