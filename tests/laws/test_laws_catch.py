"""Each law catches the fault it is there for: optimizers with one fault planted in each."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from functional_optim import NoState, Optimizer, Transform, chain, sgd
from functional_optim.aliasing import Given
from functional_optim.numeric import add
from functional_optim.testing import LawBroken, check_optimizer

from ..choices import case
from .faulty import Hyper, optimizer_of, require_caught, runs_on
from .support import PURE


class Momentum(NamedTuple):
    momentum: Tensor


def zeros(param: Tensor, hyper: Hyper) -> Momentum:
    return Momentum(torch.zeros_like(param))


def writes_to_the_gradient(
    param: Tensor, grad: Tensor, state: NoState, c: Hyper
) -> tuple[Tensor, NoState]:
    grad.mul_(2.0)
    return param - c.lr * grad, state


def writes_to_the_state(
    param: Tensor, grad: Tensor, state: Momentum, c: Hyper
) -> tuple[Tensor, Momentum]:
    state.momentum.add_(grad)
    return param - c.lr * state.momentum, state


CALLS: list[int] = []


def remembers(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    CALLS.append(1)
    return param - c.lr * grad * len(CALLS), state


def normalises(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return param - c.lr * grad / (grad.abs().sum() + 1.0), state


def other_of_tensors(
    param: Tensor, grad: Tensor, state: NoState, c: Hyper
) -> tuple[Tensor, NoState]:
    if isinstance(c.lr, Tensor):
        return add(param, grad, -2.0 * c.lr), state
    return add(param, grad, -c.lr), state


def branches_on_data(
    param: Tensor, grad: Tensor, state: NoState, c: Hyper
) -> tuple[Tensor, NoState]:
    if float(grad.sum()) > 0.0:
        return param - c.lr * grad, state
    return param, state


def cuts_the_graph(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return param.detach() - c.lr * grad, state


def squashes(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return param - c.lr * torch.sigmoid(grad), state


def mean_of_four(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    flat = grad.reshape(-1)
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % 4)).view(-1, 4)
    mean = rows.mean(dim=1, keepdim=True).expand(-1, 4).reshape(-1)[: flat.numel()]
    return param - c.lr * mean.view_as(param), state


def too_long(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return param - 1.5 * c.lr * grad, state


def with_norm_of_all(
    grad: Tensor, param: Tensor, state: NoState, c: Hyper, total: Tensor
) -> tuple[Tensor, NoState]:
    return grad / (1.0 + total.to(grad.dtype)), state


def spreading_sum(grad: Tensor) -> Tensor:
    return grad.to(torch.float64).square().sum()


def clipped(lr: float = 0.1) -> Optimizer:
    spreading = Transform(
        name="spreading", hyper=Hyper, transform=with_norm_of_all, measure=spreading_sum
    )
    return chain(spreading(lr=lr), sgd(lr=lr))


COMMON = torch.zeros(())


def common(param: Tensor, hyper: Hyper) -> Momentum:
    """One tensor for all parameters of all optimizers."""
    return Momentum(COMMON)


def keeps_no_gradient(
    param: Tensor, grad: Tensor, state: Momentum, c: Hyper
) -> tuple[Tensor, Momentum]:
    return param - c.lr * grad, Momentum(state.momentum + 1.0)


FAULTS = [
    ("pure", optimizer_of(writes_to_the_gradient), None),
    ("pure", optimizer_of(writes_to_the_state, state=Momentum, init=zeros), None),
    ("own memory", optimizer_of(keeps_no_gradient, state=Momentum, init=common), None),
    ("in place", optimizer_of(remembers), None),
    ("any moment", optimizer_of(remembers), None),
    ("any split by leaves", optimizer_of(remembers), None),
    ("any split by elements", optimizer_of(normalises), None),
    ("one result", optimizer_of(squashes), None),
    ("any filling", optimizer_of(mean_of_four, granularity=4, fillable=True), None),
    ("blocked is reference", optimizer_of(runs_on), None),
    ("any history", optimizer_of(remembers), None),
    ("bound is reference", optimizer_of(runs_on), None),
    ("capturable is close", optimizer_of(other_of_tensors), None),
    ("vmap is the loop", optimizer_of(branches_on_data), None),
    ("differentiable", optimizer_of(cuts_the_graph), None),
    ("contained", clipped, None),
    ("same as the oracle", optimizer_of(too_long), torch.optim.SGD),
]


@pytest.mark.parametrize(("law", "factory", "oracle"), FAULTS)
def test_the_law_catches_the_fault(law: str, factory: Any, oracle: Any) -> None:
    require_caught(law, factory, oracle)


def test_the_example_is_small() -> None:
    with pytest.raises(LawBroken) as caught:
        check_optimizer(optimizer_of(too_long), torch.optim.SGD, laws=["same as the oracle"])
    run = caught.value.example
    assert len(run.leaves) == 1
    assert len(run.steps) == 1
    assert run.params()["a"].numel() == 1


def test_options_reach_factory_and_oracle() -> None:
    with pytest.raises(LawBroken, match="lr"):
        check_optimizer(
            lambda lr: sgd(lr=lr if lr < 0.5 else 0.4),
            torch.optim.SGD,
            options=st.fixed_dictionaries({"lr": st.floats(0.0, 1.0)}),
        )


def test_an_unknown_law_is_named() -> None:
    with pytest.raises(ValueError, match="no law 'none'"):
        check_optimizer(sgd, laws=["none"])


def test_every_law_has_a_fault_or_cannot_be_broken_by_a_rule() -> None:
    """Some are about the machinery alone: no rule reaches step counts, complex views or names."""
    caught = {law for law, _, _ in FAULTS}
    assert set(PURE) - caught == {
        "one step each",
        "complex is its real view",
        "by name",
    }


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
    """The law of memory, were results handed out as rules return them (fault 4)."""
    for factory in SHARING.values():
        check_optimizer(factory, laws=["own memory"], max_examples=5)
    monkeypatch.setattr(Given, "apart", lambda self, result: result)
    for name, factory in SHARING.items():
        with case(name=name), pytest.raises(LawBroken, match="shares memory with an argument"):
            check_optimizer(factory, laws=["own memory"])
