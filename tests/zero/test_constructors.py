"""Tests of functions in place of an optimizer class.

Such a function makes a functional Optimizer, or a torch.optim.Optimizer.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from functional_optim import NoState, Optimizer, Rule, adamw, chain, clip_by_value, sgd
from hooks import apply_optimizer_in_backward
from sharding import POLICIES, ZeroRedundancyOptimizer, plan
from tests.choices import case

if TYPE_CHECKING:
    from functional_optim import Optimizer as ForTypeCheckers

pytestmark = pytest.mark.usefixtures("world_of_one")


def undeclared(lr=1e-3):
    return chain(clip_by_value(1.0), sgd(lr=lr, momentum=0.9))


def declared(lr: float = 1e-3) -> Optimizer:
    return undeclared(lr)


def declared_elsewhere(lr: float = 1e-3) -> "ForTypeCheckers":
    return undeclared(lr)


class Factory:
    def __call__(self, lr: float = 1e-3) -> Any:
        return undeclared(lr)

    def made(self, lr: float = 1e-3) -> Any:
        return undeclared(lr)


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


OURS: dict[str, Callable[..., Any]] = {
    "declared": declared,
    "undeclared": undeclared,
    "declared by a name for type checkers": declared_elsewhere,
    "lambda": lambda lr=1e-3: chain(clip_by_value(1.0), sgd(lr=lr, momentum=0.9)),
    "any options": lambda **options: chain(clip_by_value(1.0), sgd(momentum=0.9, **options)),
    "partial": functools.partial(undeclared),
    "an object": Factory(),
    "a method": Factory().made,
    "a method of an optimizer": undeclared().replace,
    "decorated": _wrapped(undeclared),
}


def sgd_of_torch(groups: Any = (), lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


THEIRS: dict[str, Callable[..., Any]] = {
    "params": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "another name": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9),
    "a default": lambda params=(), lr=0.1: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "anything": lambda *args, **kwargs: torch.optim.SGD(*args, momentum=0.9, **kwargs),
    "partial": functools.partial(torch.optim.SGD, momentum=0.9),
    "declared": sgd_of_torch,
}


def stepped(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Tensor:
    param = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    one = make([param])
    for grad in ([0.5, 3.0, -1.0], [0.1, 0.2, -5.0]):
        param.grad = torch.tensor(grad)
        one.step()
    return param.detach()


def partial_zero(given: Any) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    return lambda params: ZeroRedundancyOptimizer(params, given, lr=0.25)


def test_one_s_own_constructor_is_taken() -> None:
    """A constructor steps as its optimizer does, even if it does not declare what it returns."""
    want = stepped(lambda params: ZeroRedundancyOptimizer(params, undeclared(lr=0.25)))
    for name, given in OURS.items():
        with case(name=name):
            for overlap in (False, True):
                zero = ZeroRedundancyOptimizer(
                    [nn.Parameter(torch.ones(3))], given, overlap_with_ddp=overlap, lr=0.25
                )
                assert zero.param_groups[0]["lr"] == 0.25
                assert zero.param_groups[0]["clip_value"] == 1.0
            got = stepped(partial_zero(given))
            assert torch.equal(got, want)


def test_one_that_takes_parameters_is_torchs() -> None:
    """A function that takes parameters makes a torch.optim.Optimizer."""
    want = stepped(lambda params: torch.optim.SGD(params, lr=0.25, momentum=0.9, foreach=False))
    for name, given in THEIRS.items():
        with case(name=name):
            got = stepped(partial_zero(given))
            assert torch.equal(got, want)


class Hyper(NamedTuple):
    lr: float


def halve(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return torch.sub(param, grad, alpha=c.lr), state


WHOLE = Rule(name="whole", hyper=Hyper, rule=halve, kind="per_matrix")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda rate: sgd(2 * rate), r"the function .*<lambda>.*, but missing .* 'rate'"),
        (
            lambda lr: clip_by_value(2 * lr),
            r"return a functional_optim\.Optimizer .* returned clip_by_value\(",
        ),
        (lambda lr: None, "returned None"),
        (WHOLE, r"makes a link of a chain.*chain\(whole\(\*\*hyper\)\)"),
        (clip_by_value(1.0), r"got clip_by_value\(clip_value=1.0\)"),
    ],
    ids=["another argument", "a link", "nothing", "a stage", "no function"],
)
def test_what_makes_no_optimizer_is_told(given: Any, message: str) -> None:
    """A function that makes no optimizer is refused with a short message."""
    with pytest.raises(TypeError, match=message) as caught:
        ZeroRedundancyOptimizer([nn.Parameter(torch.ones(3))], given, lr=0.5)
    assert len(str(caught.value)) < 300


def test_in_backward_takes_them_too() -> None:
    """apply_optimizer_in_backward accepts the same functions as ZeroRedundancyOptimizer."""
    for name, given in (OURS | THEIRS).items():
        with case(name=name):
            linear = nn.Linear(2, 1)
            apply_optimizer_in_backward(given, linear.parameters(), {"lr": 0.5}, ddp=False)
            before = linear.bias.detach().clone()
            linear(torch.ones(1, 2)).sum().backward()
            assert torch.equal(linear.bias.detach(), before - 0.5)


# ------------------------------------------------------------------------ options of a policy


@pytest.mark.parametrize("name", ["elements", "sliced"])
def test_what_a_policy_asks_for_can_be_given(name: str) -> None:
    """The error of a policy names an option that solves the problem, in a form that is accepted."""
    linear = nn.Linear(3, 3)
    given = f"functools.partial(sharding.POLICIES['{name}'], mixed=True)"
    with pytest.raises(ValueError, match="needs it whole") as caught:
        ZeroRedundancyOptimizer(linear.parameters(), chain(WHOLE(lr=0.1)), policy=name)
    assert given in str(caught.value)
    policy = functools.partial(POLICIES[name], mixed=True)
    zero = ZeroRedundancyOptimizer(linear.parameters(), chain(WHOLE(lr=0.1)), policy=policy)
    assert zero.plan.is_whole
    assert plan(linear, 2, name, chain(WHOLE(lr=0.1)), mixed=True).is_whole


def test_an_option_that_a_policy_needs_is_told() -> None:
    """The error for a missing option of a policy names the option and the policy."""
    linear = nn.Linear(3, 3)
    message = r"the policy 'hierarchical': missing .* 'node_size'.*POLICIES\['hierarchical'\],"
    with pytest.raises(TypeError, match=message):
        ZeroRedundancyOptimizer(linear.parameters(), adamw(), policy="hierarchical")
    with pytest.raises(TypeError, match=message):
        plan(linear, 2, "hierarchical")
    policy = functools.partial(POLICIES["hierarchical"], nodes=2)
    with pytest.raises(TypeError, match=message):
        ZeroRedundancyOptimizer(linear.parameters(), adamw(), policy=policy)
    with pytest.raises(TypeError, match=r"'largest_first': got an unexpected .* 'mixed'"):
        plan(linear, 2, "largest_first", mixed=True)
