"""Dtypes and options that an optimizer refuses: the law is reported as not tried, not as broken."""

import pytest
import torch
from torch import Tensor

from functional_optim import NoState, Rule, chain
from functional_optim.testing import LawBroken, LawNotTried, check_optimizer

from ..choices import case
from .faulty import Hyper, optimizer_of


def plain(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return torch.add(param, grad, alpha=-c.lr), state


def whitened(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    """Step by an eigenvalue decomposition, which the CPU has in float32 and float64 only."""
    row = grad.reshape(1, -1)
    values, _ = torch.linalg.eigh(torch.mm(row, row.t()))
    return torch.add(param, grad * values.reshape(()), alpha=-c.lr), state


def wrong_in_bfloat16(
    param: Tensor, grad: Tensor, state: NoState, c: Hyper
) -> tuple[Tensor, NoState]:
    """Refuse bfloat16, and write to the gradient in every other dtype."""
    if param.dtype == torch.bfloat16:
        raise NotImplementedError("no kernel for bfloat16")
    grad.mul_(2.0)
    return torch.add(param, grad, alpha=-c.lr), state


def test_a_dtype_that_the_rule_has_no_kernel_for_breaks_no_law() -> None:
    """A dtype without a kernel breaks no law, since the reference refuses that dtype too."""
    factory = optimizer_of(whitened, kind="per_matrix")
    with pytest.raises(LawNotTried, match="dtypes=") as caught:
        check_optimizer(factory, laws=["pure"])
    assert caught.value.example.dtype == torch.bfloat16
    assert "not implemented for 'BFloat16'" in str(caught.value)


def test_whichever_law_meets_it_first() -> None:
    """Any law that meets the refusal reports its own name, also if an executor raised the error."""
    for law in ("in place", "blocked is reference"):
        with case(law=law), pytest.raises(LawNotTried) as caught:
            check_optimizer(optimizer_of(whitened, kind="per_matrix"), laws=[law])
        assert caught.value.law == law


def test_the_dtypes_that_it_takes_are_tried() -> None:
    """``dtypes=``, the remedy in that error, runs the law in the supported dtypes."""
    factory = optimizer_of(whitened, kind="per_matrix")
    check_optimizer(factory, dtypes=(torch.float32, torch.float64), laws=["pure"], max_examples=5)


def test_a_declared_dtype_is_named() -> None:
    """The error names the dtypes that the stage declares."""
    factory = optimizer_of(plain, dtypes=(torch.float64,))
    with pytest.raises(LawNotTried, match=r"plain takes parameters of torch\.float64"):
        check_optimizer(factory, laws=["pure"])


def test_options_that_the_constructor_refuses_are_no_broken_law() -> None:
    """Options that the constructor refuses break no law."""
    with pytest.raises(LawNotTried, match="mine takes its lr from the last rule"):
        check_optimizer(lambda: chain(Rule(name="mine", hyper=Hyper, rule=plain)()), laws=["pure"])


def test_a_broken_law_is_still_one() -> None:
    """A broken law is reported as broken, also for a rule that refuses some dtypes."""
    with pytest.raises(LawBroken, match="gradient"):
        check_optimizer(optimizer_of(wrong_in_bfloat16), laws=["pure"], dtypes=(torch.float32,))
    with pytest.raises((LawBroken, LawNotTried)) as caught:
        check_optimizer(optimizer_of(wrong_in_bfloat16), laws=["pure"])
    refused = caught.value.example.dtype == torch.bfloat16
    assert isinstance(caught.value, LawNotTried if refused else LawBroken)
