"""Results of stages: valid, or refused by an error that names the stage and the result."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, Rule, TorchOptimizer, Transform, chain, sgd, stored
from functional_optim.kernels import ExecutorName
from tests.choices import each_value

from .support import IN_PYTHON, refused


class Hyper(NamedTuple):
    lr: float


class Buffers(NamedTuple):
    buf: Tensor
    many: list[Tensor]


class Others(NamedTuple):
    buf: Tensor
    many: list[Tensor]


def init(param: Tensor, hyper: Hyper) -> Buffers:
    return Buffers(torch.zeros_like(param), [torch.zeros_like(param)])


class Buffer(NamedTuple):
    buf: Tensor


def stage_of(**given: Any) -> Rule:
    """Return a rule that steps nothing, with some functions of its own."""
    usual = {"init": lambda p, h: Buffer(torch.zeros_like(p)), "rule": lambda p, g, s, c: (p, s)}
    return Rule(name="mine", hyper=Hyper, state=Buffer, **{**usual, **given})


Made = Callable[[Tensor, Tensor, Buffers, Hyper], Any]

PAIR = r"mine: must return the pair \(param, state\)"
STATE = "mine: must return its Buffers as its state; it returned "

WRONG: dict[str, tuple[Made, str]] = {
    "nothing": (lambda p, g, s, c: None, f"{PAIR}.*a NoneType: write"),
    "the parameter alone": (lambda p, g, s, c: torch.add(p, g), f"{PAIR}.*a Tensor: write"),
    "a list": (lambda p, g, s, c: [torch.add(p, g), s], f"{PAIR}.*a list: write"),
    "one of two": (lambda p, g, s, c: (torch.add(p, g),), f"{PAIR}.*a tuple of 1: write"),
    "three": (lambda p, g, s, c: (torch.add(p, g), s, s), f"{PAIR}.*a tuple of 3: write"),
    "the wrong way round": (lambda p, g, s, c: (s, p), f"{PAIR}.*place of param it returned B"),
    "a number": (lambda p, g, s, c: (1.5, s), f"{PAIR}.*place of param it returned 1.5, which"),
    "no state": (lambda p, g, s, c: (torch.add(p, g), None), f"{STATE}None"),
    "an empty state": (lambda p, g, s, c: (torch.add(p, g), ()), rf"{STATE}\(\)"),
    "a tensor for a state": (lambda p, g, s, c: (torch.add(p, g), s.buf), f"{STATE}a tensor of"),
    "a plain tuple": (lambda p, g, s, c: (torch.add(p, g), (s.buf, s.many)), rf"{STATE}\(tensor"),
    "another state": (lambda p, g, s, c: (torch.add(p, g), Others(*s)), f"{STATE}Others"),
    "a field of None": (
        lambda p, g, s, c: (torch.add(p, g), s._replace(buf=None)),
        "mine: must return a tensor as the field buf of its state; it returned None",
    ),
    "a list in place of a field": (
        lambda p, g, s, c: (torch.add(p, g), s._replace(buf=[s.buf])),
        "mine: must return a tensor as the field buf",
    ),
    "a list that grew": (
        lambda p, g, s, c: (torch.add(p, g), s._replace(many=[s.buf, s.buf])),
        "mine: must return a list of 1 tensors as the field many",
    ),
    "a list of None": (
        lambda p, g, s, c: (torch.add(p, g), s._replace(many=[None])),
        "mine: must return a list of 1 tensors as the field many",
    ),
}


def optimizer_of(rule: Made) -> Optimizer:
    stage = Rule(name="mine", hyper=Hyper, state=Buffers, init=init, rule=rule)
    return chain(stage(lr=0.1))


def _update(optimizer: Optimizer) -> None:
    params = {"w": torch.ones(3)}
    optimizer.update(params, {"w": torch.ones(3)}, optimizer.init(params))


def _update_in_place(optimizer: Optimizer) -> None:
    params = {"w": torch.ones(3)}
    optimizer.update_(params, {"w": torch.ones(3)}, optimizer.init(params))


def _bound(optimizer: Optimizer) -> None:
    optimizer.bind({"w": torch.ones(3)}).step({"w": torch.ones(3)})


def _in_torch(optimizer: Optimizer) -> None:
    param = torch.ones(3, requires_grad=True)
    param.grad = torch.ones(3)
    TorchOptimizer([param], optimizer).step()


STEPS = {
    "update": _update,
    "update_": _update_in_place,
    "bind": _bound,
    "TorchOptimizer": _in_torch,
}


@each_value(wrong=WRONG, way=STEPS, executor=IN_PYTHON)
def test_a_wrong_result_names_the_rule(wrong: Any, way: Any, executor: ExecutorName) -> None:
    rule, message = wrong
    with pytest.raises(TypeError, match=message) as caught:
        way(optimizer_of(rule).using(executor=executor))
    assert len(str(caught.value)) < 300


def _traceless(param: Tensor, grad: Tensor, state: Buffers, c: Hyper) -> Any:
    if float(grad.sum()) > 0.0:
        return torch.add(param, grad)
    return param, state


def test_so_does_one_that_cannot_be_traced() -> None:
    """The reference runs a rule that cannot be traced."""
    with pytest.raises(TypeError, match=f"{PAIR}.*a Tensor: write"):
        _bound(optimizer_of(_traceless).using(executor="blocked"))


def test_a_stored_rule_is_named_by_its_own_name() -> None:
    """The error names the stage inside, and not the storage around it."""
    kept = stored(optimizer_of(lambda p, g, s, c: torch.add(p, g)), state="bfloat16")
    with pytest.raises(TypeError, match=PAIR):
        _update(kept)


OF_TRANSFORM: list[tuple[Any, type[Exception], str]] = [
    (
        lambda g, p, s, c: g,
        TypeError,
        r"scale: must return the pair \(grad, state\), the state \(\)",
    ),
    (lambda g, p, s, c: (g, None), TypeError, r"scale: must return \(\), which it was given"),
    (lambda g, p, s, c: (g, (g,)), TypeError, r"scale: must return \(\), which it was given"),
    (lambda g, p, s, c: (2.0, s), TypeError, "place of grad it returned 2.0"),
    (
        lambda g, p, s, c: (g.sum(), s),
        RuntimeError,
        r"of shape \(\) for one of shape \(3,\)",
    ),
]


def test_so_does_a_transform() -> None:
    """A transform returns the gradient first."""
    for made, error, message in OF_TRANSFORM:
        scale = Transform(name="scale", hyper=Hyper, transform=made, kind="per_matrix")
        with refused(error, message):
            _update(chain(scale(lr=1.0), sgd(0.1)))


def test_an_init_that_makes_no_state_is_named() -> None:
    """The error comes before the first step."""
    for made in (None, torch.ones(3), (torch.ones(3), []), ()):
        stage = Rule(
            name="mine",
            hyper=Hyper,
            state=Buffers,
            init=lambda param, hyper, made=made: made,
            rule=lambda p, g, s, c: (p, s),
        )
        with refused(TypeError, "mine: init must return its Buffers as its state", made=made):
            chain(stage(lr=0.1)).init(torch.ones(3))


def test_an_init_that_returns_memory_it_keeps_is_refused() -> None:
    """Otherwise the state of all parameters would be one tensor, and every step would write it."""
    kept = torch.zeros(3)
    for said, made in {
        "init returned memory that it also returned in another call": lambda: kept,
        "init returned a tensor whose elements share memory": lambda: torch.zeros(1).expand(3),
    }.items():
        stage = stage_of(init=lambda p, h, made=made: Buffer(made()))
        with refused(TypeError, f"mine: {said}, in the field buf", said=said):
            chain(stage(lr=0.1)).init([torch.ones(3), torch.ones(3)])
        with refused(TypeError, f"mine: {said}, in the field buf", said=said):
            chain(stage(lr=0.1)).init(torch.ones(3))  # of another optimizer
    param = torch.ones(3)  # its memory may be returned, and is copied
    state = chain(stage_of(init=lambda p, h: Buffer(p))(lr=0.1)).init(param)
    assert state.leaves.stages[0].buf.data_ptr() != param.data_ptr()


@pytest.mark.parametrize("executor", IN_PYTHON)
def test_coefficients_that_are_no_named_tuple_are_named(executor: ExecutorName) -> None:
    param, grad = torch.ones(3), torch.ones(3)
    for made in (None, (0.1, 1.0), 0.1, {"lr": 0.1}):
        stage = stage_of(coefficients=lambda step, hyper, made=made: made)
        optimizer = chain(stage(lr=0.1)).using(executor=executor)
        steps = {
            "update": lambda o=optimizer: o.update(param, grad, o.init(param)),
            "update_": lambda o=optimizer: o.update_(param, grad, o.init(param)),
            "bind": lambda o=optimizer: o.bind(param).step(grad),
        }
        for name, step in steps.items():
            with refused(TypeError, "mine: coefficients must return a NamedTuple", name=name):
                step()


def test_a_measure_that_returns_no_number_is_named() -> None:
    for measure in (lambda g: g * g, lambda g: float(g.sum()), lambda g: None):
        stage = Transform(
            name="mine",
            hyper=Hyper,
            measure=measure,
            transform=lambda g, p, s, c, total: (g / total.to(g.dtype), s),
        )
        optimizer = chain(stage(lr=0.1), sgd(lr=0.1))
        for params in ([torch.ones(3)], [torch.ones(3), torch.ones(4, 2)]):
            grads = list(map(torch.ones_like, params))
            with refused(TypeError, "mine: measure must return a 0-d tensor"):
                optimizer.update(params, grads, optimizer.init(params))


def test_the_error_of_a_schedule_says_whose_it_is() -> None:
    optimizer, param = sgd(lr=lambda step: 0.1 / step), torch.ones(3)
    with pytest.raises(ZeroDivisionError) as raised:
        optimizer.update(param, param, optimizer.init(param))
    assert raised.value.__notes__ == ["raised by the schedule of sgd: lr, after 0 steps"]


class Seen(NamedTuple):
    calls: float


def counted(**given: Any) -> Optimizer:
    """Return sgd after a transform that counts calls and sums gradients, with some functions."""
    usual: dict[str, Any] = {
        "init_shared": lambda hyper: Seen(0.0),
        "reduce": lambda p, g, s, c: (g.sum(),),
        "combine": lambda shared, totals, hyper: Seen(shared.calls + totals[0]),
    }
    stage = Transform(
        name="mine",
        hyper=Hyper,
        shared=Seen,
        totals=1,
        coefficients=lambda step, hyper, shared: hyper,
        transform=lambda g, p, s, c: (g, s),
        **{**usual, **given},
    )
    return chain(stage(lr=0.1), sgd(lr=0.1))


SHARED_RESULTS: dict[str, tuple[str, Any]] = {
    "one total too many": ("reduce", lambda p, g, s, c: (g.sum(), g.sum())),
    "a total alone": ("reduce", lambda p, g, s, c: g.sum()),
    "a number as total": ("reduce", lambda p, g, s, c: (1.0,)),
    "a vector as total": ("reduce", lambda p, g, s, c: (g,)),
    "no scalars": ("init_shared", lambda hyper: None),
    "a plain tuple": ("init_shared", lambda hyper: (0.0,)),
    "a vector": ("init_shared", lambda hyper: Seen(torch.zeros(3))),
    "a text": ("combine", lambda shared, totals, hyper: Seen("a")),
}


def test_shared_scalars_and_totals_of_another_form_are_named() -> None:
    grads = [torch.ones(3), torch.ones(2)]
    for case, (name, function) in SHARED_RESULTS.items():
        params = [torch.ones(3), torch.ones(2)]
        optimizer = counted(**{name: function})
        with refused(TypeError, f"mine: {name} must return", case=case):
            optimizer.update_(params, grads, optimizer.init(params))
        with refused(TypeError, f"mine: {name} must return", case=case):
            step_by_torch(optimizer, params, grads)
        assert all(torch.equal(one, torch.ones_like(one)) for one in params)


def step_by_torch(optimizer: Optimizer, params: list[Tensor], grads: list[Tensor]) -> None:
    made = TorchOptimizer(params, optimizer)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    made.step()


def test_a_total_that_writes_to_its_gradient_is_refused() -> None:
    measured = Transform(
        name="mine",
        hyper=Hyper,
        measure=lambda g: g.mul_(2).sum(),
        transform=lambda g, p, s, c, total: (g, s),
    )
    for optimizer in (
        counted(reduce=lambda p, g, s, c: (g.mul_(2).sum(),)),
        chain(measured(lr=0.1), sgd(lr=0.1)),
    ):
        params, grads = [torch.ones(3), torch.ones(2)], [torch.ones(3), torch.ones(2)]
        with refused(RuntimeError, "mine: .* wrote to its arguments", optimizer=optimizer):
            optimizer.update_(params, grads, optimizer.init(params))
        with refused(RuntimeError, "mine: .* wrote to its arguments", optimizer=optimizer):
            step_by_torch(optimizer, params, grads)
        assert all(torch.equal(one, torch.ones_like(one)) for one in params)
