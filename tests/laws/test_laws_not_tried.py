"""What an optimizer refuses whatever the law is reported as that, and not as a broken law."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import NoState, Optimizer, Rule, chain
from functional_optim.executors.errors import UnscriptableError
from functional_optim.testing import LawBroken, LawNotTried, check_optimizer


class Hyper(NamedTuple):
    lr: float


def unscriptable(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    import math

    return torch.add(param, grad, alpha=-math.cos(0.0) * c.lr), state


def whitened(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    """An eigenvalue decomposition, which the CPU has in float32 and float64 only."""
    row = grad.reshape(1, -1)
    values, _ = torch.linalg.eigh(torch.mm(row, row.t()))
    return torch.add(param, grad * values.reshape(()), alpha=-c.lr), state


def wrong_in_bfloat16(
    param: Tensor, grad: Tensor, state: NoState, c: Hyper
) -> tuple[Tensor, NoState]:
    """It refuses nothing but bfloat16, and writes to its gradient in the others."""
    if param.dtype == torch.bfloat16:
        raise NotImplementedError("no kernel for bfloat16")
    grad.mul_(2.0)
    return torch.add(param, grad, alpha=-c.lr), state


def optimizer_of(rule: Callable[..., Any], **options: Any) -> Callable[..., Optimizer]:
    stage = Rule(name="mine", hyper=Hyper, rule=rule, **options)
    return lambda lr=0.1: chain(stage(lr=lr))


class TestScript:
    @pytest.mark.parametrize("law", ["script is reference", "program is reference"])
    def test_a_rule_that_torchscript_does_not_take_breaks_no_law(self, law: str) -> None:
        """Cause and way out are named (fault 23)."""
        with pytest.raises(LawNotTried, match="scripted=False") as caught:
            check_optimizer(optimizer_of(unscriptable), laws=[law], max_examples=3)
        assert caught.value.law == law
        assert isinstance(caught.value.__cause__, UnscriptableError)
        assert "mine: TorchScript does not take unscriptable" in str(caught.value)

    def test_without_it_the_other_laws_hold(self) -> None:
        """The way out is one (fault 23)."""
        check_optimizer(optimizer_of(unscriptable), scripted=False, max_examples=3)

    def test_a_rule_without_annotations_says_so(self) -> None:
        """TorchScript needs them (fault 23)."""
        rule = optimizer_of(lambda p, g, s, c: (torch.add(p, g, alpha=-c.lr), s))
        with pytest.raises(LawNotTried, match="four annotated arguments"):
            check_optimizer(rule, laws=["script is reference"], max_examples=3)

    @pytest.mark.parametrize(
        "run",
        [
            lambda one: one.update(torch.ones(2), torch.ones(2), one.init(torch.ones(2))),
            lambda one: one.script(torch.ones(2)),
        ],
        ids=["the executor", "script()"],
    )
    def test_the_error_names_the_stage_and_the_line(self, run: Callable[[Optimizer], Any]) -> None:
        """Not TorchScript's own text alone, which shows code that is none of the caller's."""
        optimizer = optimizer_of(unscriptable)().using(executor="script")
        with pytest.raises(
            UnscriptableError, match=r"mine: .* unscriptable: .*import math"
        ) as caught:
            run(optimizer)
        assert "executor='reference'" in str(caught.value)
        assert "\n" not in str(caught.value)


class TestInputs:
    def test_a_dtype_that_the_rule_has_no_kernel_for_breaks_no_law(self) -> None:
        """The reference refuses it too (fault 23)."""
        factory = optimizer_of(whitened, kind="per_matrix")
        with pytest.raises(LawNotTried, match="dtypes=") as caught:
            check_optimizer(factory, laws=["pure"])
        assert caught.value.example.dtype == torch.bfloat16
        assert "not implemented for 'BFloat16'" in str(caught.value)

    @pytest.mark.parametrize("law", ["in place", "blocked is reference", "script is reference"])
    def test_whichever_law_meets_it_first(self, law: str) -> None:
        """Also where the refusal comes out of an executor (fault 23)."""
        with pytest.raises(LawNotTried) as caught:
            check_optimizer(optimizer_of(whitened, kind="per_matrix"), laws=[law])
        assert caught.value.law == law

    def test_the_dtypes_that_it_takes_are_tried(self) -> None:
        """The way out is one (fault 23)."""
        factory = optimizer_of(whitened, kind="per_matrix")
        check_optimizer(factory, dtypes=(torch.float32, torch.float64), laws=["pure", "in place"])

    def test_a_declared_dtype_is_named(self) -> None:
        """What the stage says it takes (fault 23)."""
        factory = optimizer_of(unscriptable, dtypes=(torch.float64,))
        with pytest.raises(LawNotTried, match=r"mine takes parameters of torch\.float64"):
            check_optimizer(factory, laws=["pure"])

    def test_options_that_the_constructor_refuses_are_no_broken_law(self) -> None:
        """An example of no options is refused by one that needs some (fault 23)."""
        with pytest.raises(LawNotTried, match="mine takes its lr from the rule"):
            check_optimizer(
                lambda: chain(Rule(name="mine", hyper=Hyper, rule=unscriptable)()), laws=["pure"]
            )

    def test_a_broken_law_is_still_one(self) -> None:
        """Also of a rule that refuses some inputs."""
        with pytest.raises(LawBroken, match="gradient"):
            check_optimizer(optimizer_of(wrong_in_bfloat16), laws=["pure"], dtypes=(torch.float32,))
        with pytest.raises((LawBroken, LawNotTried)) as caught:
            check_optimizer(optimizer_of(wrong_in_bfloat16), laws=["pure"])
        refused = caught.value.example.dtype == torch.bfloat16
        assert isinstance(caught.value, LawNotTried if refused else LawBroken)
