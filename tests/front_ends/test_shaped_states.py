"""Rules whose state depends on the shape: calls of ``init``, and the fields that are kept."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    Rule,
    TorchOptimizer,
    chain,
    from_torch,
    register_functional_optim,
)
from functional_optim.core.state_init import fields_of

from .support import assert_same_tensors, parameters, same_bits, set_grads

SHAPES = ((3, 4), (37,), (2, 30), ())


class Hyper(NamedTuple):
    lr: float


class Sides(NamedTuple):
    sides: list[Tensor]


def short(param: Tensor) -> list[int]:
    return [size for size in param.shape if size <= 8]


def sides_init(param: Tensor, hyper: Hyper) -> Sides:
    return Sides([param.new_zeros(size) for size in short(param)])


def sides_rule(param: Tensor, grad: Tensor, state: Sides, c: Hyper) -> tuple[Tensor, Sides]:
    made, step = [], grad
    for side, place in zip(
        state.sides, [k for k, size in enumerate(param.shape) if size <= 8], strict=True
    ):
        others = [k for k in range(param.dim()) if k != place]
        now = 0.5 * side + (grad.square().sum(others) if others else grad.square())
        shape = [1] * param.dim()
        shape[place] = -1
        step = step * (1.0 + now).rsqrt().view(shape)
        made.append(now)
    return param - c.lr * step, Sides(made)


def sided(init: Callable[..., Sides] = sides_init) -> Optimizer:
    stage = Rule(
        name="sided", hyper=Hyper, state=Sides, init=init, rule=sides_rule, kind="per_matrix"
    )
    return chain(stage(lr=0.1)).using(executor="blocked")


def params() -> list[torch.nn.Parameter]:
    return parameters(0, shapes=SHAPES)


class Live(torch.optim.Optimizer):
    """Optimizer that only holds a state made elsewhere."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


def by_update(optimizer: Optimizer, steps: range) -> list[Tensor]:
    held = params()
    now: Any = [param.detach() for param in held]
    state = optimizer.init(now)
    for step in steps:
        set_grads(held, step)
        now, state = optimizer.update(now, [param.grad for param in held], state)
    return list(now)


def run(own: list[torch.nn.Parameter], optimizer: Any, steps: range) -> None:
    for step in steps:
        set_grads(own, step)
        optimizer.step()


def test_stepped_and_resumed() -> None:
    """Every tensor of a list has its own name, and is restored from a checkpoint."""
    own = params()
    one = TorchOptimizer(own, sided())
    run(own, one, range(3))
    assert set(one.state[own[0]]) == {"step", "sides[0]", "sides[1]"}
    assert set(one.state[own[1]]) == {"step"}
    assert set(one.state[own[2]]) == {"step", "sides"}
    again = [torch.nn.Parameter(param.detach().clone()) for param in own]
    two = TorchOptimizer(again, sided())
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for held, optimizer in ((own, one), (again, two)):
        run(held, optimizer, range(3, 6))
    assert_same_tensors(again, own)
    assert_same_tensors(own, by_update(sided(), range(6)))


def test_a_list_that_lacks_a_tensor_is_refused() -> None:
    """The error names the missing tensor."""
    own = params()
    one = TorchOptimizer(own, sided())
    run(own, one, range(1))
    state_dict = copy.deepcopy(one.state_dict())
    del state_dict["state"][0]["sides[1]"]
    with pytest.raises(ValueError, match=r"differing: sides\[1\]"):
        one.load_state_dict(state_dict)


def test_an_init_that_looks_at_values() -> None:
    """Such an ``init`` cannot run on a tensor without memory, so it gets one with memory."""

    def init(param: Tensor, hyper: Hyper) -> Sides:
        start = float(param.abs().sum())
        return Sides([torch.full((size,), start) for size in short(param)])

    fields = fields_of(sided(init).stages, (Hyper(0.1),), (3, 4), torch.float32)
    assert [field.tensors for field in fields[0]] == [2]
    own = params()
    start = float(own[0].detach().abs().sum())
    optimizer = TorchOptimizer(own, sided(init))
    assert same_bits(optimizer.state[own[0]]["sides[0]"], torch.full((3,), start))
    run(own, optimizer, range(2))


class Kept(NamedTuple):
    buf: list[Tensor]


def matrices_init(param: Tensor, hyper: Hyper) -> Kept:
    return Kept([torch.zeros_like(param)] if param.dim() >= 2 else [])


def matrices_rule(param: Tensor, grad: Tensor, state: Kept, c: Hyper) -> tuple[Tensor, Kept]:
    if not state.buf:
        return param - c.lr * grad, state
    buf = 0.9 * state.buf[0] + grad
    return param - c.lr * buf, Kept([buf])


def test_element_by_element_but_for_matrices_only() -> None:
    """Each parameter has the fields of its shape, also where flat buffers hold the parameters."""
    stage = Rule(name="m", hyper=Hyper, state=Kept, init=matrices_init, rule=matrices_rule)
    optimizer = chain(stage(lr=0.1))
    for make in (TorchOptimizer, lambda own, one: one.bind(own)):
        own = params()
        run(own, make(own, optimizer), range(3))
        assert_same_tensors(own, by_update(optimizer, range(3)))


def test_from_torch_takes_what_is_there() -> None:
    """``from_torch`` also reads lists of several tensors."""
    register_functional_optim(Live, lambda lr: sided())
    own = params()
    ours = TorchOptimizer(own, sided())
    run(own, ours, range(2))
    live = Live(own)
    live.load_state_dict(copy.deepcopy(ours.state_dict()))
    made = from_torch(live)
    sides = made.state.leaves[0]["0"].stages[0].sides
    assert_same_tensors(sides, [ours.state[own[0]][f"sides[{k}]"] for k in range(2)])
