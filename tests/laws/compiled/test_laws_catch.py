"""Each law of compiled steps catches its fault. A rule that TorchScript refuses breaks no law."""

from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import NoState
from functional_optim.kernels.errors import UnscriptableError
from functional_optim.testing import LawNotTried, check_optimizer

from ..faulty import FAULTS, Hyper, optimizer_of, require_caught, require_caught_in_one_run, runs_on
from ..support import COMPILED


def other_in_script(
    param: Tensor, grad: Tensor, state: NoState, c: Hyper
) -> tuple[Tensor, NoState]:
    if torch.jit.is_scripting():
        return param - 2.0 * c.lr * grad, state
    return param - c.lr * grad, state


def other_when_traced(
    param: Tensor, grad: Tensor, state: NoState, c: Hyper
) -> tuple[Tensor, NoState]:
    if not torch.jit.is_scripting() and torch.compiler.is_compiling():
        return param - 2.0 * c.lr * grad, state
    return param - c.lr * grad, state


COMPILING = {
    "script is reference": other_in_script,
    "auto is reference": runs_on,
    "compiled is reference": runs_on,
    "traced is close": other_when_traced,
}


@pytest.mark.parametrize("law", COMPILED)
def test_the_law_catches_the_fault(law: str) -> None:
    require_caught_in_one_run(law, optimizer_of(COMPILING[law]))


@pytest.mark.parametrize(("law", "factory", "oracle"), FAULTS)
def test_the_law_finds_the_fault_in_what_is_drawn(law: str, factory: Any, oracle: Any) -> None:
    require_caught(law, factory, oracle)


def unscriptable(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    import math

    return torch.add(param, grad, alpha=-math.cos(0.0) * c.lr), state


def test_a_rule_that_torchscript_does_not_take_breaks_no_law() -> None:
    """A rule that TorchScript refuses reports the law as not tried, with cause and remedy."""
    law = "script is reference"
    with pytest.raises(LawNotTried, match="scripted=False") as caught:
        check_optimizer(optimizer_of(unscriptable), laws=[law], max_examples=3)
    assert caught.value.law == law
    assert isinstance(caught.value.__cause__, UnscriptableError)
    assert "TorchScript does not take unscriptable" in str(caught.value)


def test_without_it_the_other_laws_hold() -> None:
    """``scripted=False``, the remedy in that error, lets the other laws run and hold."""
    check_optimizer(optimizer_of(unscriptable), scripted=False, max_examples=1)


def test_a_rule_without_annotations_says_so() -> None:
    """A rule without annotations is refused with an error that asks for them."""
    rule = optimizer_of(lambda p, g, s, c: (torch.add(p, g, alpha=-c.lr), s))
    with pytest.raises(LawNotTried, match="four annotated arguments"):
        check_optimizer(rule, laws=["script is reference"], max_examples=3)


def test_the_error_names_the_stage_and_the_line() -> None:
    """The error names the stage and the user's line in one line, without TorchScript's own text."""
    optimizer = optimizer_of(unscriptable)()
    said = r"unscriptable: .* unscriptable: .*import math"
    with pytest.raises(UnscriptableError, match=said) as caught:
        optimizer.script(torch.ones(2))
    assert "step this chain by update_ or bind" in str(caught.value)
    assert "\n" not in str(caught.value)
