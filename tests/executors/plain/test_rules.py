"""Rules of a user's own, with the turns that an executor may take wrongly, by every executor."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import NoState, Optimizer, sgd
from functional_optim.executors import blocked

from ...choices import case, pairs
from ..rules import RULES, VARIANTS, Hyper, stateless
from ..support import (
    LARGE,
    Tree,
    assert_same,
    bits,
    bound_steps,
    differ,
    gradients,
    new_tensors,
    no_reference,
    noise,
    pure_steps,
    steps_in_place,
    tree,
)

EVERY = {**RULES, **VARIANTS}
RUNS = {"pure": pure_steps, "in place": steps_in_place, "bound": bound_steps}
DTYPES = (torch.float32, torch.float64, torch.complex64)


def expected(optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> Any:
    """What the pure reference executor gives: it never writes to what a rule was given."""
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
    """What overflows, vanishes or is no number does so in every executor, also in company."""
    special = [0.0, -0.0, 1e-45, -1e-38, 3e38, -3e38, 1e20, -1e20, 1.0, 2e19, 5e-20]
    numbers = torch.tensor([*special, float("nan"), float("inf"), -float("inf")])
    params = {"w": numbers.repeat(14), "v": numbers.flip(0)}
    grads = {"w": numbers.repeat_interleave(14), "v": numbers.roll(3)}
    for (name, optimizer), executor in itertools.product(EVERY.items(), executors):
        with case(name=name, executor=executor):
            state = optimizer.init(params)
            want, _ = optimizer.using(executor="reference").update(params, grads, state)
            got, _ = optimizer.using(executor=executor).update(params, grads, state)
            for key in params:  # which NaN it is does not matter
                same = bits(got[key]) == bits(want[key])
                assert bool((same | (got[key].isnan() & want[key].isnan())).all())


def test_none_of_them_goes_to_the_reference(
    near_borders: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, one in RULES.items():
        with case(name=name):
            optimizer = one.using(executor="blocked")
            want = expected(optimizer)
            with no_reference(monkeypatch):
                assert_same(steps_in_place(optimizer, tree(0), gradients), want)


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


def new_memory_of(optimizer: Optimizer) -> list[str]:
    """What third steps make, one in place and two of a bound optimizer."""
    params, grads = {"z": noise(0, LARGE)}, {"z": noise(1, LARGE)}
    state, bound = optimizer.init(params), optimizer.bind({"z": noise(0, LARGE)})
    for _ in range(2):
        with new_tensors() as made:
            optimizer.update_(params, grads, state)
            bound.step(grads)
            bound.step(bound.gradients)
    return made


def test_a_large_leaf_is_stepped_without_new_memory(near_borders: None) -> None:
    for name in sorted({*EVERY} - {"library"}):
        with case(name=name):
            assert new_memory_of(EVERY[name].using(executor="blocked")) == []
    assert "aten.lerp.Scalar" in new_memory_of(EVERY["adamw"])  # it would be seen


def test_what_was_tried_on_few_elements_holds_for_many(near_borders: None) -> None:
    """3.0 / x is two operations in torch, which on some elements agree with one division."""
    optimizer = RULES["numbers_on_the_left"].using(executor="blocked")
    for first in (torch.full((1,), 1.0), torch.full((2,), -2.0)):
        blocked._PROGRAMS.clear()
        optimizer.update(first, first, optimizer.init(first))
        assert_same(pure_steps(optimizer, tree(0), gradients), expected(optimizer))
        assert len(blocked._PROGRAMS) == 1


def test_blocks_may_be_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    params, grads = {"z": noise(0, 1000)}, {"z": noise(1, 1000)}
    for one in pairs(size=[1, 3, 64, 999, 1000, 10**9], name=["swap", "numbers_on_the_left"]):
        monkeypatch.setenv("FUNCTIONAL_OPTIM_BLOCK", str(one["size"]))
        with case(**one):
            optimizer = RULES[one["name"]]
            state = optimizer.init(params)
            got = optimizer.using(executor="blocked").update(params, grads, state)
            assert_same(got, optimizer.update(params, grads, state))


def turned_rule(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return torch.rsub(grad, param, alpha=c.lr), state  # it has no out=


def test_what_is_read_once_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """But where an operation makes new memory, where several pass over it, or where one asks."""
    sizes: list[int] = []
    cut = blocked._cut

    def counted(tensors: Any, stages: Any, size: int) -> Any:
        sizes.append(size)
        return cut(tensors, stages, size)

    monkeypatch.setattr(blocked, "_cut", counted)
    monkeypatch.setattr(blocked, "cache_bytes", lambda: 1)
    count = (1 << 16) + 1
    cases = {
        "one operation": (sgd(0.1), []),
        "several": (sgd(0.1, momentum=0.9), [1 << 16]),
        "new memory": (stateless(turned_rule), [1 << 16]),
        "asked for": (sgd(0.1), [50_000]),
    }
    for name, (optimizer, wanted) in cases.items():
        with case(name=name):
            sizes.clear()
            if name == "asked for":
                monkeypatch.setenv("FUNCTIONAL_OPTIM_BLOCK", "50000")
            params: Tree = {"w": noise(0, count)}
            want, _ = optimizer.update(params, params, optimizer.init(params))
            stepping = optimizer.using(executor="blocked")
            stepping.update_(params, {"w": noise(0, count)}, stepping.init(params))
            assert sizes == wanted
            assert_same(params, want)


def test_a_block_size_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, params = VARIANTS["adamw"].using(executor="blocked"), tree(0)
    state = optimizer.init(params)
    for text in ("0", "-5", "many", "1.5", ""):
        monkeypatch.setenv("FUNCTIONAL_OPTIM_BLOCK", text)
        with pytest.raises(ValueError, match=r"FUNCTIONAL_OPTIM_BLOCK must be a whole number"):
            optimizer.update_(params, gradients(0), state)
        assert_same((params, state), (tree(0), optimizer.init(tree(0))))
