"""Rules of a user's own, with the turns that an executor may take wrongly, by every executor."""

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import NoState, Optimizer, Rule, chain, sgd
from functional_optim.executors import blocked

from .rules import RULES, VARIANTS
from .support import (
    assert_same,
    bound_steps,
    differ,
    gradients,
    new_tensors,
    no_reference,
    pure_steps,
    steps_in_place,
    tree,
)

RUNS = {"pure": pure_steps, "in place": steps_in_place, "bound": bound_steps}
DTYPES = (torch.float32, torch.float64, torch.complex64)


def expected(optimizer: Optimizer, dtype: torch.dtype) -> Any:
    """What the pure reference executor gives: it never writes to what a rule was given."""
    return pure_steps(
        optimizer.using(executor="reference"), tree(0, dtype), lambda step: gradients(step, dtype)
    )


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("executor", ["reference", "script", "blocked"])
@pytest.mark.parametrize("name", RULES)
def test_they_are_the_reference_bit_for_bit(name: str, executor: Any, run: str) -> None:
    for dtype in DTYPES:
        optimizer = RULES[name].using(executor=executor)
        want = expected(optimizer, dtype)
        got = RUNS[run](optimizer, tree(0, dtype), lambda step, d=dtype: gradients(step, d))
        assert_same(got, want)
        if name != "keep_all":
            assert differ(want[0], tree(0, dtype))


@pytest.mark.parametrize("name", RULES)
def test_none_of_them_goes_to_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = RULES[name].using(executor="blocked")
    want = expected(optimizer, torch.float32)
    with no_reference(monkeypatch):
        got = steps_in_place(optimizer, tree(0), gradients)
    assert_same(got, want)


@pytest.mark.parametrize("executor", ["reference", "script", "blocked"])
@pytest.mark.parametrize("name", RULES)
def test_no_result_shares_memory_with_another_or_with_an_input(name: str, executor: Any) -> None:
    optimizer = RULES[name].using(executor=executor)
    params, grads = tree(0), gradients(0)
    state = optimizer.init(params)
    optimizer.update_(params, grads, state)
    every = [
        (params[key], *(field for stage in state.leaves[key].stages for field in stage), grads[key])
        for key in params
    ]
    for group in every:
        for a, b in itertools.combinations([one for one in group if one.numel()], 2):
            assert a.data_ptr() != b.data_ptr()


@pytest.mark.parametrize("name", [*sorted({*RULES} - {"library"}), *VARIANTS])
def test_a_large_leaf_is_stepped_without_new_memory(name: str) -> None:
    optimizer = {**RULES, **VARIANTS}[name].using(executor="blocked")
    params, grads = {"z": tree(0)["z"]}, {"z": tree(1)["z"]}
    state = optimizer.init(params)
    bound, given = optimizer.bind({"z": tree(0)["z"]}), tree(1)["z"]
    optimizer.update_(params, grads, state)
    bound.step({"z": given})
    with new_tensors() as made:
        optimizer.update_(params, grads, state)
        bound.step({"z": given})
        bound.step(bound.gradients)
    assert made == []


def test_new_memory_would_be_seen() -> None:
    optimizer, params = VARIANTS["adamw"], {"z": tree(0)["z"]}
    state = optimizer.init(params)
    with new_tensors() as made:
        optimizer.update_(params, params, state)
    assert "aten.lerp.Scalar" in made


def test_what_was_tried_on_few_elements_holds_for_many() -> None:
    # 3.0 / x is two operations in torch, which on some elements agree with one division.
    optimizer = RULES["numbers_on_the_left"].using(executor="blocked")
    for first in (torch.full((1,), 1.0), torch.full((2,), -2.0)):
        blocked._PROGRAMS.clear()
        optimizer.update(first, first, optimizer.init(first))
        assert len(blocked._PROGRAMS) == 1
        assert_same(pure_steps(optimizer, tree(0), gradients), expected(optimizer, torch.float32))
        assert len(blocked._PROGRAMS) == 1


@pytest.mark.parametrize("size", [1, 3, 64, 1000, 65_536, 10**9])
def test_blocks_may_be_of_any_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUNCTIONAL_OPTIM_BLOCK", str(size))
    for name in ("swap", "reuses", "numbers_on_the_left"):
        params, grads = {"z": tree(0)["z"][:5000]}, {"z": tree(1)["z"][:5000]}
        optimizer = RULES[name]
        want = optimizer.update(params, grads, optimizer.init(params))
        got = optimizer.using(executor="blocked").update(params, grads, optimizer.init(params))
        assert_same(got, want)


class Rate(NamedTuple):
    lr: float


def turned_rule(param: Tensor, grad: Tensor, state: NoState, c: Rate) -> tuple[Tensor, NoState]:
    return torch.rsub(grad, param, alpha=c.lr), state  # it has no out=


@pytest.fixture
def cut_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of the blocks, whenever a lane is cut."""
    sizes: list[int] = []
    cut = blocked._cut

    def counted(tensors: Any, stages: Any, size: int) -> Any:
        sizes.append(size)
        return cut(tensors, stages, size)

    monkeypatch.setattr(blocked, "_cut", counted)
    return sizes


def test_one_operation_that_makes_new_memory_is_cut(cut_sizes: list[int]) -> None:
    optimizer = chain(Rule(name="turned", hyper=Rate, rule=turned_rule)(lr=0.5))
    stepping = optimizer.using(executor="blocked")
    param, grad = torch.ones(2_500_000), torch.ones(2_500_000)
    stepping.update_(param, grad, stepping.init(param))
    assert len(cut_sizes) == 1
    assert param.eq(0.5).all()


@pytest.mark.parametrize("cuts", [0, 1])
def test_what_is_read_once_is_not_cut(
    cuts: int, cut_sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = sgd(0.1, momentum=0.9 * cuts)
    param, grad = torch.ones(2_500_000), torch.linspace(-1.0, 1.0, 2_500_000)
    want, _ = optimizer.update(param, grad, optimizer.init(param))
    stepping = optimizer.using(executor="blocked")
    stepping.update_(param, grad, stepping.init(param))
    assert len(cut_sizes) == cuts
    assert torch.equal(param, want)
    if not cuts:
        monkeypatch.setenv("FUNCTIONAL_OPTIM_BLOCK", "1000000")
        stepping.update_(param, grad, stepping.init(param))
        assert cut_sizes == [1_000_000]


@pytest.mark.parametrize("text", ["0", "-5", "many", "1.5", ""])
def test_a_block_size_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUNCTIONAL_OPTIM_BLOCK", text)
    optimizer, params = VARIANTS["adamw"].using(executor="blocked"), tree(0)
    state = optimizer.init(params)
    with pytest.raises(ValueError, match=r"FUNCTIONAL_OPTIM_BLOCK must be a whole number"):
        optimizer.update_(params, gradients(0), state)
    assert_same((params, state), (tree(0), optimizer.init(tree(0))))
