"""``as_functional_optim`` and its registry."""

import inspect
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    DistributedOptimizer,
    NoState,
    Optimizer,
    Rule,
    TorchOptimizer,
    as_functional_optim,
    chain,
    clip_by_value,
    functional_optim_map,
    qhm,
    register_functional_optim,
    sgd,
)
from tests.choices import each

from .support import CASES, REGISTERED

EXECUTION = ["foreach", "fused", "capturable", "differentiable"]


class Unknown(torch.optim.Optimizer):
    """Class that is not registered."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})


class Several(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        betas: Any = (),
        eps: float = 0.0,
        *,
        maximize: bool = False,
    ):
        super().__init__(params, {})


class Mine(torch.optim.SGD):
    """Subclass whose step may differ from that of its base class."""


@each(cls=REGISTERED)
def test_every_default_is_the_class_s_own(cls: type) -> None:
    optimizer = as_functional_optim(cls)
    defaults = {
        name: one.default
        for name, one in inspect.signature(cls).parameters.items()
        if name not in ("params", *EXECUTION)
    }
    decoupled = defaults.pop("decoupled_weight_decay", cls is torch.optim.AdamW)
    # A flag that is off has the same meaning as a missing flag.
    made = {key: one for key, one in optimizer.hyper.items() if key in defaults or one is not False}
    assert made == defaults
    assert [s.name == "decoupled_weight_decay" for s in optimizer.stages].count(True) == decoupled


def test_the_defaults_in_which_torch_s_functional_classes_differ() -> None:
    assert as_functional_optim(torch.optim.SGD).hyper["lr"] == 1e-3
    assert as_functional_optim(torch.optim.Adamax).hyper["lr"] == 2e-3


@each(name=CASES)
def test_arguments_by_name(name: str) -> None:
    """Arguments that choose an implementation have no effect, or are refused as in the class."""
    cls, options = CASES[name]
    made = as_functional_optim(cls, **options)
    numbers = options.keys() - {"decoupled_weight_decay"}
    assert {key: made.hyper[key] for key in numbers} == {key: options[key] for key in numbers}
    for option in EXECUTION:
        if option in inspect.signature(cls).parameters:
            assert as_functional_optim(cls, **options, **{option: True}) == made
        else:
            with pytest.raises(TypeError, match=option):
                as_functional_optim(cls, **options, **{option: True})


@each(cls=REGISTERED)
def test_arguments_by_position(cls: Any) -> None:
    """Positions follow the class, which counts options that choose an implementation."""
    kinds = inspect.signature(cls).parameters.items()
    names = [name for name, one in kinds if one.kind is one.POSITIONAL_OR_KEYWORD][1:]
    defaults = cls([torch.zeros(1, 1, requires_grad=True)], 0.25).defaults
    by_name = {name: defaults[name] for name in names if name not in EXECUTION}
    made = as_functional_optim(cls, *(defaults[name] for name in names))
    assert made == as_functional_optim(cls, **by_name)
    assert made.hyper["lr"] == 0.25


def test_positions_are_torch_s_where_they_mean_different_things() -> None:
    made = as_functional_optim(torch.optim.RMSprop, 0.1, 0.2, 0.3, 0.4, 0.5, True)
    names = ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize")
    assert made.hyper == dict(zip(names, (0.1, 0.2, 0.3, 0.4, 0.5, True, False), strict=True))


@each(cls=REGISTERED)
def test_an_argument_that_the_class_has_not_is_a_type_error(cls: type) -> None:
    """The argument is refused even if the factory accepts it."""
    for bad in ({"learning_rate": 0.1}, {"params": []}, {"decoupled_weight_decay": True}):
        if bad.keys().isdisjoint(inspect.signature(cls).parameters.keys() - {"params"}):
            with pytest.raises(TypeError):
                as_functional_optim(cls, **bad)
    with pytest.raises(TypeError):
        as_functional_optim(cls, *range(20))


@each(key=[Unknown, Mine, torch.optim.Optimizer, int, "qhm", ("a", 1), None])
def test_an_unknown_key_is_a_value_error_that_says_what_is_known(key: Any) -> None:
    """The error lists the known keys. A subclass of a known class is unknown."""
    with pytest.raises(ValueError, match=r"Adadelta.*register_functional_optim"):
        as_functional_optim(key)


def test_the_map_is_a_read_only_view() -> None:
    assert set(functional_optim_map) == {*REGISTERED, torch.optim.LBFGS}
    changed: Any = functional_optim_map
    with pytest.raises(TypeError):
        changed["sgd"] = sgd
    with pytest.raises(TypeError):
        del changed[torch.optim.SGD]
    assert not hasattr(functional_optim_map, "clear")
    register_functional_optim("later", sgd)
    assert functional_optim_map["later"] is sgd


def test_a_second_registration_raises_and_changes_nothing() -> None:
    register_functional_optim(Unknown, sgd)
    for _ in range(2):
        with pytest.raises(ValueError, match="replace=True"):
            register_functional_optim(Unknown, qhm)
        assert functional_optim_map[Unknown] is sgd
    with pytest.raises(ValueError, match="SGD"):
        register_functional_optim(torch.optim.SGD, qhm)
    register_functional_optim(Unknown, qhm, replace=True)
    assert functional_optim_map[Unknown] is qhm


def test_a_factory_takes_the_arguments_of_its_class() -> None:
    """Fault 25: registration reports all differences between the arguments of both."""

    def bare(lr: float = 0.1) -> Optimizer:
        return sgd(lr)

    def renamed(rate: float, decay: float = 0.0, **rest: Any) -> Optimizer:
        return sgd(rate, weight_decay=decay)

    class Two(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.1, nu: float = 1.0, *, fused: Any = None):
            super().__init__(params, {"lr": lr, "nu": nu})

    told = [
        (Two, bare, "the factory of Two .* does not take nu. Let"),
        (Several, bare, "does not take betas, eps, maximize"),
        (Two, renamed, "the class does not have rate"),
        (Unknown, lambda lr, /: sgd(lr), "does not take lr"),
    ]
    for cls, factory, why in told:
        with pytest.raises(TypeError, match=why):
            register_functional_optim(cls, factory)
        assert cls not in functional_optim_map
    for taken in (lambda **options: sgd(options["lr"]), lambda lr, nu, more=0: sgd(lr)):
        register_functional_optim(Two, taken, replace=True)
        assert as_functional_optim(Two, lr=0.5) == sgd(0.5)


def test_a_factory_has_to_be_callable() -> None:
    with pytest.raises(TypeError, match="callable"):
        register_functional_optim("x", sgd())  # type: ignore[arg-type]  # that is the test
    assert "x" not in functional_optim_map


def test_a_factory_has_to_return_an_optimizer() -> None:
    params = {"w": torch.nn.Parameter(torch.ones(2))}
    register_functional_optim("a number", lambda: 3)
    register_functional_optim("an instance", lambda: TorchOptimizer(list(params.values()), sgd()))
    for key in ("a number", "an instance"):
        told = f"the factory of '{key}' must return an Optimizer"
        with pytest.raises(TypeError, match=told):
            as_functional_optim(key)
        with pytest.raises(TypeError, match=told):
            DistributedOptimizer.over_threads(key, params, {"w": "a"})


def test_names_and_other_hashable_keys_hand_their_arguments_on() -> None:
    def clipped(bound: float, *, lr: float = 0.5, fused: bool = False) -> Optimizer:
        return chain(clip_by_value(bound), sgd(lr, maximize=fused))

    for key in ("clipped", ("clipped", 1), clipped):
        register_functional_optim(key, clipped)
        assert as_functional_optim(key, 2.0) == clipped(2.0)
        assert as_functional_optim(key, bound=2.0, lr=0.1) == clipped(2.0, lr=0.1)
        # Arguments of a factory without a torch class always go to the factory.
        assert as_functional_optim(key, 2.0, fused=True) == clipped(2.0, fused=True)
        with pytest.raises(TypeError):
            as_functional_optim(key, 2.0, momentum=0.9)


class QHM(torch.optim.Optimizer):
    """Class with its own order of arguments."""

    def __init__(self, params: Any, nu: float = 0.25, lr: float = 0.5, *, foreach: Any = None):
        super().__init__(params, {"lr": lr, "nu": nu, "foreach": foreach})


class Open(torch.optim.Optimizer):
    """Class with arguments that its signature does not show."""

    def __init__(self, params: Any, *rest: Any, lr: float = 0.5, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})


def test_a_user_s_class_gives_its_own_defaults_and_order() -> None:
    register_functional_optim(QHM, qhm)
    assert as_functional_optim(QHM, 0.75, foreach=True) == qhm(lr=0.5, nu=0.75)
    assert as_functional_optim(QHM) == qhm(lr=0.5, nu=0.25)
    register_functional_optim(Open, sgd)
    assert as_functional_optim(Open, momentum=0.9) == sgd(0.5, 0.9)
    for option in EXECUTION:
        assert as_functional_optim(Open, **{option: False}) == sgd(0.5)


def test_values_that_torch_refuses_are_refused() -> None:
    with pytest.raises(ValueError, match="lr must"):
        as_functional_optim(torch.optim.SGD, -0.1)
    with pytest.raises(ValueError, match="one element"):
        as_functional_optim(torch.optim.Adam, torch.zeros(2))


class Hyper(NamedTuple):
    lr: float


def normalised(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return param - c.lr * grad / (grad.norm() + 1.0), state


NORMALISED = Rule(name="normalised", hyper=Hyper, rule=normalised)
WHOLE = Rule(name="normalised", hyper=Hyper, rule=normalised, kind="per_matrix")


def test_a_rule_that_says_it_is_pointwise_and_is_not_is_refused_with_an_example() -> None:
    """The rule is refused at registration, or at its first use if it needs arguments."""
    with pytest.raises(ValueError, match=r"^normalised .*two parts.* becomes -?\d.*per_matrix"):
        register_functional_optim("normalised", lambda lr=0.1: chain(NORMALISED(lr=lr)))
    assert "normalised" not in functional_optim_map
    register_functional_optim("needs lr", lambda lr: chain(NORMALISED(lr=lr)))
    with pytest.raises(ValueError, match="per_matrix"):
        as_functional_optim("needs lr", lr=0.1)


@each(executor=["auto", "blocked", "reference"])
def test_declared_per_matrix_it_is_taken(executor: Any) -> None:
    register_functional_optim("whole", lambda lr=0.1: chain(WHOLE(lr=lr)), replace=True)
    optimizer = as_functional_optim("whole").using(executor=executor)
    grad = torch.tensor([3.0, 4.0])
    new, _ = optimizer.update(torch.zeros(2), grad, optimizer.init(torch.zeros(2)))
    assert torch.allclose(new, -0.1 * grad / 6.0)


def test_an_argument_that_a_class_does_not_have_is_named_with_the_class() -> None:
    with pytest.raises(TypeError, match="AdamW: .*'beta'; its arguments are params, lr, betas"):
        as_functional_optim(torch.optim.AdamW, lr=0.1, beta=0.9)
