"""Measured stages: a sum over all gradients first, to be split over parts of a tree."""

from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    adam,
    chain,
    clip_by_global_norm,
    clip_by_value,
    decoupled_weight_decay,
    rmsprop,
    sgd,
)

from .support import CHAINS, Frozen, assert_differ, assert_same, noise

CLIPPED = chain(clip_by_global_norm(1.0), sgd(1.0))


def _exact(seed: int) -> dict[str, Tensor]:
    """Gradients whose norms are integers: their squares add up exactly, in any order."""
    a, b, c = (torch.tensor(1.0 + seed * prime % 9).double() for prime in (5, 7, 11))
    return {
        "a": a * torch.tensor([[3.0, -4.0], [0.0, 12.0], [0.0, 0.0]]),
        "b": b * torch.tensor([1.0, -1.0, 1.0, 1.0]),
        "c": -c,
        "d": torch.zeros(0).double(),
    }


def _part(tree: Any, keys: str) -> Any:
    return {key: tree[key] for key in keys}


def test_measure_is_the_sum_of_squares() -> None:
    grads = _exact(0)
    total = CLIPPED.measure(grads, grads, CLIPPED.init(grads))
    assert total.dtype == torch.float64
    assert total.shape == ()
    assert total.item() == sum(grad.square().sum().item() for grad in grads.values())


def test_measure_skips_missing_gradients_and_changes_nothing() -> None:
    grads: dict[str, Any] = _exact(0)
    state = CLIPPED.init(grads)
    frozen = Frozen(grads, state)
    whole = CLIPPED.measure(grads, grads, state)
    rest = CLIPPED.measure(grads, {**grads, "a": None}, state)
    assert whole - rest == grads["a"].square().sum()
    assert CLIPPED.measure(grads, dict.fromkeys(grads), state).item() == 0.0
    frozen.assert_untouched()


@pytest.mark.parametrize("executor", ["reference", "script"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("parts", [("abcd",), ("ab", "cd"), ("d", "c", "b", "a"), ("ca", "bd")])
def test_parts_stepped_with_the_sum_equal_the_whole(
    parts: tuple[str, ...], in_place: bool, executor: Any
) -> None:
    optimizer = chain(clip_by_global_norm(1.0), adam(0.1)).using(executor=executor)
    params, state = _exact(0), optimizer.init(_exact(0))
    pieces = [_part(_exact(0), keys) for keys in parts]
    states = [optimizer.init(piece) for piece in pieces]
    for step in range(3):
        grads = _exact(step + 1)
        params, state = optimizer.update(params, grads, state)
        shares = [
            optimizer.measure(piece, _part(grads, keys), one)
            for piece, keys, one in zip(pieces, parts, states, strict=True)
        ]
        total = torch.stack(shares).sum()
        for i, keys in enumerate(parts):
            arguments = (pieces[i], _part(grads, keys), states[i])
            if in_place:
                optimizer.update_(*arguments, measured=[total])
            else:
                pieces[i], states[i] = optimizer.update(*arguments, measured=[total])
    for piece, keys, one in zip(pieces, parts, states, strict=True):
        assert_same(piece, _part(params, keys))
        assert_same(one.leaves, _part(state.leaves, keys))


def test_without_the_sum_parts_differ_from_the_whole() -> None:
    grads = _exact(1)
    whole, _ = CLIPPED.update(grads, grads, CLIPPED.init(grads))
    part = _part(grads, "a")
    alone, _ = CLIPPED.update(part, part, CLIPPED.init(part))
    assert_differ(alone, _part(whole, "a"))


MEASURED = {
    name: (optimizer, sum(stage.name == "clip_by_global_norm" for stage in optimizer.stages))
    for name, optimizer in CHAINS.items()
}


@pytest.mark.parametrize("executor", ["reference", "script"])
@pytest.mark.parametrize("name", MEASURED)
def test_every_measured_stage_takes_its_own_total(name: str, executor: Any) -> None:
    """Totals are measured one after the other: each needs those of the stages before it."""
    optimizer, count = MEASURED[name]
    optimizer = optimizer.using(executor=executor)
    params = {"a": noise(0, 3), "b": noise(1, 4)}
    state = optimizer.init(params)
    for step in range(2):
        grads = {"a": noise(step + 2, 3), "b": noise(step + 12, 4)}
        totals: list[Tensor] = []
        for _ in range(count):
            totals.append(optimizer.measure(params, grads, state, measured=totals))
        whole = optimizer.update(params, grads, state)
        for known in range(count + 1):
            told = optimizer.update(params, grads, state, measured=totals[:known])
            assert_same(told, whole)
        params, state = whole


def test_the_second_total_is_of_what_the_first_stage_made() -> None:
    optimizer = chain(clip_by_value(1.0), clip_by_global_norm(9.0), clip_by_global_norm(1.0), sgd())
    grads = [torch.tensor([3.0]), torch.tensor([0.5])]
    state = optimizer.init(grads)
    first = optimizer.measure(grads, grads, state)
    assert first.item() == 1.25
    shrunk = optimizer.measure(grads, grads, state, measured=[torch.tensor(81.0 * 4).double()])
    assert shrunk.item() == pytest.approx(1.25 / 4, rel=1e-6)


def test_each_stage_scales_by_its_own_total() -> None:
    """The first lets a norm of 5 pass; the second clips what the value clip made of it."""
    optimizer = chain(
        clip_by_global_norm(9.0), clip_by_value(3.5), clip_by_global_norm(2.0), sgd(1.0)
    )
    params = {"a": torch.zeros(1).double(), "b": torch.zeros(1).double()}
    grads = {"a": torch.full((1,), 3.0).double(), "b": torch.full((1,), 4.0).double()}
    new, _ = optimizer.update(params, grads, optimizer.init(params))
    norm = (3.0**2 + 3.5**2) ** 0.5
    assert new["a"].item() == pytest.approx(-3.0 * 2.0 / (norm + 1e-6), rel=1e-14)
    assert new["b"].item() == pytest.approx(-3.5 * 2.0 / (norm + 1e-6), rel=1e-14)


def test_a_rule_before_the_measured_stage_is_seen_by_it() -> None:
    """A transform reads the parameter: behind a decoupled decay it reads the shrunk one."""
    optimizer = CHAINS["clipped behind a decay"]
    param, grad = torch.ones(1).double(), torch.zeros(1).double()
    total = optimizer.measure(param, grad, optimizer.init(param))
    assert total.item() == pytest.approx((0.2 * (1 - 0.1 * 0.3)) ** 2, rel=1e-12)


def test_totals_may_be_given_as_a_tuple() -> None:
    grads = _exact(1)
    state = CLIPPED.init(grads)
    wanted = CLIPPED.update(grads, grads, state)
    total = CLIPPED.measure(grads, grads, state)
    assert_same(CLIPPED.update(grads, grads, state, measured=(total,)), wanted)


def test_measure_through_a_scripted_chain_is_the_same() -> None:
    for optimizer in CHAINS.values():
        params, grads = {"a": noise(0, 3)}, {"a": noise(1, 3)}
        state = optimizer.init(params)
        assert_same(
            optimizer.using(executor="script").measure(params, grads, state),
            optimizer.measure(params, grads, state),
        )


def test_a_derivative_goes_through_the_norm() -> None:
    """The clipped gradient has length one, whatever it was: its derivative is tangential."""
    grad = torch.tensor([3.0, 4.0], dtype=torch.float64, requires_grad=True)
    param = torch.zeros(2, dtype=torch.float64)
    new, _ = CLIPPED.update(param, grad, CLIPPED.init(param))
    (slope,) = torch.autograd.grad(new.norm(), grad)
    assert slope.norm() < 1e-6
    (slope,) = torch.autograd.grad(CLIPPED.update(param, grad, CLIPPED.init(param))[0][0], grad)
    torch.testing.assert_close(slope, torch.tensor([-0.128, 0.096]).double(), rtol=1e-6, atol=0)


NOT_MEASURED: dict[str, Optimizer] = {
    "sgd": sgd(),
    "rules only": chain(decoupled_weight_decay(0.1), rmsprop()),
}


class TestRefused:
    """Totals that nobody takes, or nobody can give, are a mistake of the caller's."""

    @pytest.mark.parametrize("name", NOT_MEASURED)
    def test_measure_of_a_chain_that_measures_nothing(self, name: str) -> None:
        optimizer, param = NOT_MEASURED[name], torch.ones(1)
        with pytest.raises(ValueError, match="measure"):
            optimizer.measure(param, param, optimizer.init(param))

    def test_measure_beyond_the_last_measured_stage(self) -> None:
        param, total = torch.ones(1), torch.ones((), dtype=torch.float64)
        with pytest.raises(ValueError, match="measure"):
            CLIPPED.measure(param, param, CLIPPED.init(param), measured=[total])

    @pytest.mark.parametrize("method", ["update", "update_"])
    @pytest.mark.parametrize("optimizer", [sgd(), CLIPPED])
    def test_more_totals_than_measured_stages(self, optimizer: Optimizer, method: str) -> None:
        param, total = torch.ones(1), torch.ones((), dtype=torch.float64)
        with pytest.raises(ValueError, match="measured"):
            getattr(optimizer, method)(param, param, optimizer.init(param), measured=[total] * 2)

    @pytest.mark.parametrize("method", ["update", "update_"])
    def test_a_total_that_is_no_tensor(self, method: str) -> None:
        param = torch.ones(1)
        with pytest.raises(TypeError, match="measured"):
            getattr(CLIPPED, method)(param, param, CLIPPED.init(param), measured=[25.0])
