"""Custom rules with details that an executor could get wrong, run by every executor."""

import itertools
from typing import Any

import pytest
import torch

from functional_optim import Optimizer, stored
from functional_optim.kernels import foreach
from functional_optim.kernels.pieces import GRAIN_SIZE, PIECE_VARIABLE

from ...choices import case, pairs
from ...steady import peak_of
from ..rules import RULES, VARIANTS, TwoState, optimizer_of, two_init
from ..support import (
    LARGE,
    assert_same,
    bits,
    bound_steps,
    copied,
    differ,
    gradients,
    noise,
    pure_steps,
    steps_in_place,
    tree,
)

EVERY = {**RULES, **VARIANTS}
RUNS = {"pure": pure_steps, "in place": steps_in_place, "bound": bound_steps}
DTYPES = (torch.float32, torch.float64, torch.complex64)


def expected(optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> Any:
    """Return steps of the pure reference executor, which never writes to its arguments."""
    return pure_steps(
        optimizer.using(executor="reference"), tree(0, dtype), lambda step: gradients(step, dtype)
    )


def test_rules_are_the_reference_bit_for_bit(executors: Any) -> None:
    for one in pairs(executor=executors, name=RULES, dtype=DTYPES, run=RUNS):
        with case(**one):
            optimizer, dtype = RULES[one["name"]].using(executor=one["executor"]), one["dtype"]
            want = expected(optimizer, dtype)
            got = RUNS[one["run"]](
                optimizer, tree(0, dtype), lambda step, dtype=dtype: gradients(step, dtype)
            )
            assert_same(got, want)
            assert one["name"] == "keep_all" or differ(want[0], tree(0, dtype))


def test_values_that_are_not_finite_are_the_reference_s(executors: Any) -> None:
    """Values that overflow, underflow, or are NaN are the same in every executor."""
    special = [0.0, -0.0, 1e-45, -1e-38, 3e38, -3e38, 1e20, -1e20, 1.0, 2e19, 5e-20]
    numbers = torch.tensor([*special, float("nan"), float("inf"), -float("inf")])
    params = {"w": numbers.repeat(14), "v": numbers.flip(0)}
    grads = {"w": numbers.repeat_interleave(14), "v": numbers.roll(3)}
    for (name, optimizer), executor in itertools.product(EVERY.items(), executors):
        with case(name=name, executor=executor):
            state = optimizer.init(params)
            want, _ = optimizer.using(executor="reference").update(params, grads, state)
            got, _ = optimizer.using(executor=executor).update(params, grads, state)
            for key in params:  # the bits of a NaN do not matter
                same = bits(got[key]) == bits(want[key])
                assert bool((same | (got[key].isnan() & want[key].isnan())).all())


def test_no_result_shares_memory_with_another_or_with_an_input(executors: Any) -> None:
    for one in pairs(name=RULES, executor=executors):
        with case(**one):
            optimizer = RULES[one["name"]].using(executor=one["executor"])
            params, grads = tree(0), gradients(0)
            state = optimizer.init(params)
            optimizer.update_(params, grads, state)
            for key, param in params.items():
                fields = [field for stage in state.leaves[key].stages for field in stage]
                found = [part.data_ptr() for part in (param, *fields, grads[key]) if part.numel()]
                assert len({*found}) == len(found)


STORAGES: list[dict[str, Any]] = [
    {"param": "bfloat16"},
    {"param": "bfloat16+master"},
    {"param": "bfloat16+kahan"},
    {"param": "bfloat16+stochastic"},
    {"state": "bfloat16"},
    {"state": "bfloat16+stochastic"},
    {"param": "bfloat16+kahan", "state": "bfloat16+stochastic"},
    {"state": "int8"},
    {"state": "int8+stochastic"},
]
"""Storages whose conversions make many temporaries."""
PIECES = 4
"""Number of pieces of a leaf."""


def temporaries_of(optimizer: Optimizer) -> float:
    """Return the bytes of temporaries at a time, per element of a piece, in a few warm steps."""
    dtype = next((stage.dtypes[0] for stage in optimizer.stages if stage.dtypes), torch.float32)
    grain = GRAIN_SIZE * torch.get_num_threads()  # a piece of 16-bit floats is not smaller
    params, grads = ({"z": noise(k, PIECES * grain, dtype=dtype)} for k in range(2))
    state, bound = optimizer.init(params), optimizer.bind(copied(params))

    def step() -> None:
        optimizer.update_(params, grads, state)
        bound.step(grads)
        bound.step(bound.gradients)

    for _ in range(3):  # the second step in place is planned
        step()
    return peak_of(step) / grain


def test_temporaries_of_a_large_leaf_have_the_size_of_a_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rules have few temporaries at a time. Encodings have more, some of 64 bits."""
    monkeypatch.setenv(PIECE_VARIABLE, str(GRAIN_SIZE * torch.get_num_threads()))
    for name in sorted({*EVERY} - {"library"}):
        with case(name=name):
            assert temporaries_of(EVERY[name].using(executor="blocked")) < 24.0
    for one in pairs(name=["adam amsgrad"], place=range(len(STORAGES))):
        optimizer = stored(VARIANTS[one["name"]], **STORAGES[one["place"]])
        with case(**one):
            assert temporaries_of(optimizer.using(executor="blocked")) < 52.0
    assert temporaries_of(EVERY["adamw"].using(executor="reference")) > 24.0


def test_what_was_tried_on_few_elements_holds_for_many(near_borders: None) -> None:
    """Torch computes ``3.0 / x`` by two operations, which can differ from one division."""
    optimizer = RULES["numbers_on_the_left"].using(executor="blocked")
    for first in (torch.full((1,), 1.0), torch.full((2,), -2.0)):
        foreach._PROGRAMS.clear()
        optimizer.update(first, first.clone(), optimizer.init(first))
        assert_same(pure_steps(optimizer, tree(0), gradients), expected(optimizer))
        assert len(foreach._PROGRAMS) == 1


def test_blocks_may_be_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    params, grads = {"z": noise(0, 1000)}, {"z": noise(1, 1000)}
    for one in pairs(size=[1, 3, 64, 999, 1000, 10**9], name=["swap", "numbers_on_the_left"]):
        monkeypatch.setenv("FUNCTIONAL_OPTIM_BLOCK", str(one["size"]))
        with case(**one):
            optimizer = RULES[one["name"]]
            state = optimizer.init(params)
            got = optimizer.using(executor="blocked").update(params, grads, state)
            want = optimizer.using(executor="reference").update(params, grads, state)
            assert_same(got, want)


def test_a_block_size_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, params = VARIANTS["adamw"].using(executor="blocked"), tree(0)
    state = optimizer.init(params)
    for text in ("0", "-5", "many", "1.5", ""):
        monkeypatch.setenv("FUNCTIONAL_OPTIM_BLOCK", text)
        with pytest.raises(ValueError, match=r"FUNCTIONAL_OPTIM_BLOCK must be a whole number"):
            optimizer.update_(params, gradients(0), state)
        assert_same((params, state), (tree(0), optimizer.init(tree(0))))


def converts(p: Any, g: Any, s: Any, c: Any) -> Any:
    """Convert between dtypes in every way, and copy."""
    wide = g.double() * 3.0
    whole = (g * 100.0).to(torch.int32).long().int().short().to(torch.int64)
    few = (g * 7.0).to(torch.int8).char()
    left = s.left.half().to(torch.float32) + wide.float() * s.right.bfloat16().to(p.dtype)
    right = whole.to(p.dtype) + few.type(torch.float32) + g.bool().type_as(p)
    kept = left.clone()
    return (p.contiguous() - c.lr * kept).to(p), TwoState(kept, right)


def fills(p: Any, g: Any, s: Any, c: Any) -> Any:
    same = torch.fill(s.left, c.lr)
    return torch.clone(p) - same * g, TwoState(torch.fill(g, 2), torch.fill(s.right, c.lr) + s.left)


def copies_early(p: Any, g: Any, s: Any, c: Any) -> Any:
    """Copy a new value before the old one is read."""
    left = (s.left + g).clone()
    return p - s.left * c.lr, TwoState(left, s.right)


def test_conversions_copies_and_fills_are_the_reference(near_borders: None) -> None:
    params = {"w": noise(0, LARGE), "v": noise(1, 9)}
    given = {"w": noise(2, LARGE), "v": noise(3, 9)}
    for rule in (converts, fills, copies_early):
        optimizer = optimizer_of(rule, state=TwoState, init=two_init)
        other = optimizer.using(executor="blocked")
        foreach._PROGRAMS.clear()
        got = pure_steps(other, params, lambda _: given)
        with case(rule=rule):
            want = pure_steps(optimizer.using(executor="reference"), params, lambda _: given)
            assert_same(got, want)
            assert_same(steps_in_place(other, copied(params), lambda _: given), got)
