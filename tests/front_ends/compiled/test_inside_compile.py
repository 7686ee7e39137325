"""Steps inside torch.compile run uncompiled, and each parameter keeps its own state."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, TorchOptimizer, adamw
from tests.choices import each
from tests.front_ends.support import (
    assert_same_entries,
    assert_same_params,
    assert_same_tensors,
    noise,
    params_of,
    set_grads,
)

SHAPES = ((4,), (4,), (4,))
"""Equal shapes, so that a program compiled for one parameter would also fit the others."""

LR, DECAY, STEPS = 0.1, 0.3, 4

EXECUTORS = ("reference", "blocked", "auto", "compiled")


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def values() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(noise(i, *shape)) for i, shape in enumerate(SHAPES)]


def theirs() -> torch.optim.AdamW:
    return torch.optim.AdamW(values(), lr=LR, weight_decay=DECAY, foreach=False)


def chain_of(executor: Any = "reference") -> Optimizer:
    return adamw(lr=LR, weight_decay=DECAY).using(executor=executor)


def stepping(optimizer: Any) -> Callable[..., Any]:
    """Return a function of the caller that makes a step."""

    def step(*given: Any) -> Any:
        return optimizer.step(*given)

    return step


def compiled(function: Callable[..., Any]) -> Any:
    return torch.compile(function, backend="eager")


@each(executor=EXECUTORS)
def test_a_torch_optimizer(executor: str) -> None:
    """Steps in compiled code equal steps outside and steps of torch's AdamW, bit for bit."""
    torch.compiler.reset()
    ours, twin = (TorchOptimizer(values(), chain_of(executor)) for _ in range(2))
    torchs = theirs()
    step = compiled(stepping(ours))
    for seed in range(STEPS):
        missing = {seed % 3} if seed > 1 else set()
        for optimizer in (ours, twin, torchs):
            set_grads(params_of(optimizer), seed, without=missing)
        step()
        twin.step()
        torchs.step()
        assert_same_params(ours, twin)
        for one, other, third in zip(*map(params_of, (ours, twin, torchs)), strict=True):
            assert_same_entries(ours.state[one], twin.state[other])
            assert int(ours.state[one]["step"]) == int(torchs.state[third]["step"])
    assert_same_params(ours, torchs)


def train(optimizer: torch.optim.Optimizer, step: Callable[[Callable[[], Tensor]], Any]) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((param - 1.0).square().sum() for param in params_of(optimizer))
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss

    for _ in range(STEPS):
        step(closure)


# The compiler causes this warning when it looks at the loss.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_closure() -> None:
    """A step is right if its closure is compiled with it."""
    ours, torchs = TorchOptimizer(values(), chain_of()), theirs()
    train(ours, compiled(stepping(ours)))
    train(torchs, torchs.step)
    assert_same_params(ours, torchs)


def test_all_that_changes_an_optimizer() -> None:
    """Construction, new groups and checkpoints in compiled code give the same result as outside."""

    def program(compile_: Callable[..., Any]) -> list[Tensor]:
        params = values()
        made = compile_(lambda: TorchOptimizer(params[:2], chain_of()))()
        step = compile_(stepping(made))
        for seed in range(STEPS):
            set_grads(params, seed)
            step()
            if seed == 1:
                compile_(lambda: made.add_param_group({"params": params[2:], "lr": 0.2}))()
            if seed == 2:
                compile_(lambda: made.load_state_dict(made.state_dict()))()
        return [*params, *(value for param in params for value in made.state[param].values())]

    assert_same_tensors(program(compiled), program(lambda function: function))


Step = Callable[[list[Tensor]], None]


def bound(optimizer: Optimizer, params: Any) -> Step:
    return stepping(optimizer.bind(params))


def capturable(optimizer: Optimizer, params: Any) -> Step:
    return stepping(optimizer.bind(params, capturable=True))


def in_the_step(optimizer: Optimizer, params: Any) -> Step:
    made: list[Any] = []

    def step(grads: list[Tensor]) -> None:
        if not made:
            made.append(optimizer.bind(params))
        made[0].set_hyper(lr=LR)
        made[0].step(grads)

    return step


def scripted(optimizer: Optimizer, params: Any) -> Step:
    return stepping(optimizer.script(params))


def one_by_one(optimizer: Optimizer, params: Any) -> Step:
    made = optimizer.script(params)

    def step(grads: list[Tensor]) -> None:
        for param, grad in zip(params, grads, strict=True):
            made.step_param(param, grad)

    return step


def written(optimizer: Optimizer, params: Any) -> Step:
    state = optimizer.init(params)

    def step(grads: list[Tensor]) -> None:
        optimizer.update_(params, grads, state)

    return step


@each(
    front_end=[bound, capturable, in_the_step, scripted, one_by_one, written],
    executor=["reference", "auto"],
)
def test_every_front_end(front_end: Callable[..., Any], executor: str) -> None:
    """Front-ends keep the same state in compiled code as outside."""
    torch.compiler.reset()

    def program(compile_: Callable[..., Any]) -> list[torch.nn.Parameter]:
        params = values()
        step = compile_(front_end(chain_of(executor), params))
        for seed in range(STEPS):
            step([noise(100 * seed + i, *shape) for i, shape in enumerate(SHAPES)])
        return params

    before = [param.detach() for param in values()]
    got = program(compiled)
    assert_same_tensors(got, program(lambda function: function))
    assert not any(torch.equal(one, other) for one, other in zip(got, before, strict=True))


def test_one_graph_is_refused_before_anything_is_changed() -> None:
    """``fullgraph=True`` is refused, because a step breaks the graph, and nothing changes."""
    params = values()
    ours = TorchOptimizer(params, chain_of())
    set_grads(params, 0)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_step"):
        torch.compile(stepping(ours), fullgraph=True, backend="eager")()
    assert_same_tensors(params, values())
