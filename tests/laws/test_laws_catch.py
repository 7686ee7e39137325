"""Each law catches the fault that is planted for it."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from functional_optim import NoState, sgd
from functional_optim.core.aliasing import AliasTracker
from functional_optim.testing import (
    LAWS,
    LawBroken,
    LeafSpec,
    Run,
    Subject,
    Values,
    check_optimizer,
)
from functional_optim.testing.search import smallest_that_fails

from ..choices import case
from .faulty import (
    FAULTS,
    RUN,
    Hyper,
    Momentum,
    optimizer_of,
    require_caught_in_one_run,
    too_long,
    zeros,
)
from .support import QUICK, SLOW


def test_each_law_catches_its_fault_in_one_run_and_accuses_nobody_else() -> None:
    """Each law catches its fault in one run, and accepts sound optimizers.

    tests/laws/compiled searches random runs for the same faults.
    """
    for law, factory, oracle in FAULTS:
        require_caught_in_one_run(law, factory, oracle)


def test_the_example_is_small() -> None:
    with pytest.raises(LawBroken) as caught:
        check_optimizer(
            optimizer_of(too_long),
            torch.optim.SGD,
            dtypes=[torch.float32],
            laws=["same as the oracle"],
            max_examples=10,
        )
    run = caught.value.example
    assert len(run.leaves) == 1
    assert len(run.steps) == 1
    assert run.params()["a"].numel() == 1


class Parts(NamedTuple):
    """A random value that Hypothesis cannot shrink, but ``smaller`` can."""

    numbers: tuple[int, ...]

    def smaller(self) -> Iterator["Parts"]:
        for place in range(len(self.numbers)):
            yield Parts(self.numbers[:place] + self.numbers[place + 1 :])


def test_what_is_not_needed_is_left_out_while_it_fails_in_the_same_way() -> None:
    def check(parts: Parts) -> None:
        if not parts.numbers[:1] == (1,):
            raise ValueError("another fault")
        assert 3 not in parts.numbers

    found = smallest_that_fails(
        st.just(Parts((1, 2, 3, 4))), check, max_examples=2, derandomize=True
    )
    assert found is not None
    assert found[0] == Parts((1, 3)) and isinstance(found[1], AssertionError)


def test_numbers_are_made_as_simple_as_they_can_be() -> None:
    """The search simplifies a failing run, also where Hypothesis has nothing to shrink."""
    leaf = LeafSpec((2,), "contiguous", Values((-0.0, 5.0)))
    run = Run((), torch.float32, (leaf, leaf), ((Values((1e-4, -3.0)), None),) * 2)

    def check(run: Run) -> None:
        (grad, *_), *_ = run.steps
        if grad is None:
            raise ValueError("another fault")
        assert not (grad.numbers[1] and run.leaves[0].start.numbers[1] != 1.0)

    found = smallest_that_fails(st.just(run), check, max_examples=2, derandomize=True)
    assert found is not None and isinstance(found[1], AssertionError)
    zeros = replace(leaf, start=Values((0.0, 0.0)))
    assert found[0] == Run((), torch.float32, (zeros,), ((Values((0.0, 1.0)),),))
    assert math.copysign(1.0, found[0].leaves[0].start.numbers[0]) == 1.0


def test_options_reach_factory_and_oracle() -> None:
    with pytest.raises(LawBroken, match="lr"):
        check_optimizer(
            lambda lr: sgd(lr=lr if lr < 0.5 else 0.4),
            torch.optim.SGD,
            options=st.fixed_dictionaries({"lr": st.sampled_from([0.1, 0.7])}),
            dtypes=[torch.float32],
            laws=["same as the oracle"],
            max_examples=10,
        )


def test_an_unknown_law_is_named() -> None:
    with pytest.raises(ValueError, match="no law 'none'"):
        check_optimizer(sgd, laws=["none"])


def test_every_law_has_a_fault_or_cannot_be_broken_by_a_rule() -> None:
    """Every law has a planted fault, except for laws that no rule can break.

    Such laws concern step counts, complex views, names, and the gates that decide which stages run.
    Their faults are planted in the source instead.
    """
    caught = {law for law, _, _ in FAULTS}
    assert {*QUICK, *SLOW} - caught == {
        "one step each",
        "complex is its real view",
        "by name",
        "accumulation",
        "skipping",
        "partition",
        "masking",
        "freezing",
        "groups",
        "front-ends",
    }


@pytest.mark.parametrize("factor", [1.5, 1.0 + 2**-8])
def test_what_computes_coarsely_may_be_off_by_roundings_and_no_more(factor: float) -> None:
    """A rule that rounds to bfloat16 may differ by a few roundings under vmap, but not by more."""

    def off(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
        batched = torch._C._functorch.is_batchedtensor(grad)
        return param - c.lr * (factor if batched else 1.0) * grad, state

    def coarse(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
        return off(param, grad.to(torch.bfloat16).to(grad.dtype), state, c)

    law = LAWS["vmap is the loop"]
    if factor == 1.5:
        with pytest.raises(AssertionError, match="more than 16 roundings of their way"):
            law.check(Subject(optimizer_of(coarse)), RUN)
    else:
        law.check(Subject(optimizer_of(coarse)), RUN)
        with pytest.raises(AssertionError, match="within 64 ulp"):
            law.check(Subject(optimizer_of(off)), RUN)


def keeps_the_gradient(
    param: Tensor, grad: Tensor, state: Momentum, c: Hyper
) -> tuple[Tensor, Momentum]:
    return param - c.lr * (2.0 * grad - state.momentum), Momentum(grad)


def is_the_parameter(param: Tensor, hyper: Hyper) -> Momentum:
    return Momentum(param.detach())


SHARING = {
    "the gradient": optimizer_of(keeps_the_gradient, state=Momentum, init=zeros),
    "the parameter": optimizer_of(keeps_the_gradient, state=Momentum, init=is_the_parameter),
}


def test_shared_memory_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law "own memory" finds results that share memory if the engine does not copy them."""
    for factory in SHARING.values():
        check_optimizer(factory, laws=["own memory"], max_examples=2)
    monkeypatch.setattr(AliasTracker, "copy_if_aliased", lambda self, result: result)
    for name, factory in SHARING.items():
        with case(name=name), pytest.raises(LawBroken, match="shares memory with an argument"):
            check_optimizer(factory, laws=["own memory"], dtypes=[torch.float32])
