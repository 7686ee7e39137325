"""Bit for bit torch.optim(foreach=False), in params and state, whatever the layout and dtype."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functional_optim import (
    Optimizer,
    State,
    adadelta,
    adagrad,
    adam,
    adamax,
    adamw,
    rmsprop,
    rprop,
    sgd,
)

from .support import assert_differ, like, noise, same_bits

Twin = tuple[type[torch.optim.Optimizer], Callable[..., Optimizer], dict[str, Any]]
TWINS: dict[str, Twin] = {
    "SGD": (torch.optim.SGD, sgd, {"lr": 0.1}),
    "SGD decay": (torch.optim.SGD, sgd, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    "SGD momentum": (torch.optim.SGD, sgd, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "SGD nesterov": (torch.optim.SGD, sgd, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, adam, {"lr": 0.1, "weight_decay": 0.1}),
    "Adam amsgrad": (torch.optim.Adam, adam, {"lr": 0.1, "betas": (0.5, 0.7), "amsgrad": True}),
    "Adam decoupled": (
        torch.optim.Adam,
        adam,
        {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
    ),
    "AdamW": (torch.optim.AdamW, adamw, {"lr": 0.1}),
    "AdamW amsgrad": (torch.optim.AdamW, adamw, {"lr": 0.1, "eps": 0.1, "amsgrad": True}),
    "Adamax": (torch.optim.Adamax, adamax, {"lr": 0.1, "weight_decay": 0.1}),
    "Adadelta": (torch.optim.Adadelta, adadelta, {"rho": 0.5, "eps": 0.01, "weight_decay": 0.1}),
    "Adagrad": (
        torch.optim.Adagrad,
        adagrad,
        {"lr_decay": 0.1, "initial_accumulator_value": 0.1, "weight_decay": 0.1},
    ),
    "RMSprop": (torch.optim.RMSprop, rmsprop, {}),
    "RMSprop momentum": (torch.optim.RMSprop, rmsprop, {"momentum": 0.9, "weight_decay": 0.1}),
    "RMSprop centered": (torch.optim.RMSprop, rmsprop, {"centered": True, "maximize": True}),
    "Rprop": (torch.optim.Rprop, rprop, {"step_sizes": (0.009, 0.013)}),
}
assert {twin for twin, _, _ in TWINS.values()} == {
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Rprop,
}

LAYOUTS: dict[str, Callable[[int], Tensor]] = {
    "contiguous": lambda s: noise(s, 5, 33),
    "0-d": noise,
    "empty": lambda s: noise(s, 0, 3),
    "channels_last": lambda s: noise(s, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "transposed": lambda s: noise(s, 17, 19).t(),
    "sliced": lambda s: noise(s, 9, 70)[::2, ::3],
    "every other": lambda s: noise(s, 401)[1::2],
    "column": lambda s: noise(s, 40, 3)[:, 1:2],
}


def _in(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """The tensor in another dtype, with its strides."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    return made.copy_(tensor)


def _assert_twins(param: Tensor, state: State, theirs: nn.Parameter, their_state: Any) -> None:
    assert same_bits(param, theirs)
    assert param.stride() == theirs.stride()
    own = {}
    for stage in state.leaves.stages:
        own.update(stage._asdict() if stage else {})
    kept = {key: value for key, value in their_state.items() if key != "step"}
    for field, value in own.items():
        values = value if isinstance(value, list) else [value]
        for tensor in values:
            assert same_bits(tensor, kept.pop(field)), field
    assert all(value is None for value in kept.values())


def _run(
    twin: Twin, start: Tensor, grads: list[Tensor], compare: bool = True
) -> tuple[Tensor, nn.Parameter]:
    """Both through the same steps, ours in three ways; compared after every one."""
    make, hyper = twin[1], twin[2]
    theirs = nn.Parameter(like(start, start))
    torch_optimizer = twin[0]([theirs], foreach=False, **hyper)
    optimizer, scripted = make(**hyper), make(**hyper).using(executor="script")
    ours = [like(start, start) for _ in range(3)]
    states = [optimizer.init(param) for param in ours]
    for grad in grads:
        theirs.grad = grad
        torch_optimizer.step()
        ours[0], states[0] = optimizer.update(ours[0], grad, states[0])
        optimizer.update_(ours[1], grad, states[1])
        ours[2], states[2] = scripted.update(ours[2], grad, states[2])
        if compare:
            for param, state in zip(ours, states, strict=True):
                _assert_twins(param, state, theirs, torch_optimizer.state[theirs])
    return ours[0], theirs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TWINS)
def test_ours_is_theirs(name: str, layout: str, dtype: torch.dtype) -> None:
    start = _in(dtype, LAYOUTS[layout](0))
    grads = [_in(dtype, LAYOUTS[layout](step)) for step in range(1, 5)]
    end, _ = _run(TWINS[name], start, grads)
    if start.numel():
        assert_differ(end, start)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "spread",
    [
        lambda g: g.t().contiguous().t(),
        lambda g: g[:1].expand(g.shape),
        lambda g: torch.stack([g, g], 2)[..., 1],
    ],
    ids=["transposed", "expanded", "interleaved"],
)
@pytest.mark.parametrize("name", TWINS)
def test_a_gradient_in_a_layout_of_its_own(
    name: str, spread: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """Not in half precision: there torch's SGD rounds by the layout of its first gradient."""
    start = noise(0, 17, 19, dtype=dtype)
    grads = [spread(noise(step, 17, 19, dtype=dtype)) for step in range(1, 4)]
    assert not grads[0].is_contiguous()
    _run(TWINS[name], start, grads)


@pytest.mark.parametrize("name", TWINS)
def test_extreme_values(name: str) -> None:
    """Infinities, NaN, denormals and huge numbers, in every pairing of parameter and gradient."""
    values = torch.tensor(
        [1.0, -1.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40, 3e38, -3e38, 1e-20, 1e20]
    )
    grid = torch.cartesian_prod(values, values)
    grads = [(-1.0) ** step * grid[:, 1] for step in range(4)]
    ours, theirs = _run(TWINS[name], grid[:, 0].contiguous(), grads, compare=False)
    torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=0, equal_nan=True)
    assert ours.isnan().any()
    assert ours.isfinite().any()


@pytest.mark.parametrize("name", TWINS)
def test_signed_zeros(name: str) -> None:
    """A gradient of -0.0 (a ReLU makes them): torch's first momentum is a copy of it."""
    values = torch.tensor([0.0, -0.0, 1.0, -1.0])
    grid = torch.cartesian_prod(values, values)
    grads = [grid[:, 1].roll(3 * step).contiguous() for step in range(3)]
    _run(TWINS[name], grid[:, 0].contiguous(), grads)


def test_a_missing_gradient_is_missed_as_by_torch() -> None:
    twin, make, hyper = TWINS["AdamW amsgrad"]
    theirs = [nn.Parameter(noise(i, 4)) for i in range(2)]
    torch_optimizer = twin(theirs, foreach=False, **hyper)
    params = [p.detach().clone() for p in theirs]
    state = make(**hyper).init(params)
    for step in range(4):
        grads = [noise(step + 5, 4), noise(step + 9, 4) if step % 2 else None]
        for param, grad in zip(theirs, grads, strict=True):
            param.grad = grad
        torch_optimizer.step()
        params, state = make(**hyper).update(params, grads, state)
    for i in range(2):
        leaf = State(state.leaves[i])
        _assert_twins(params[i], leaf, theirs[i], torch_optimizer.state[theirs[i]])
        assert int(torch_optimizer.state[theirs[i]]["step"]) == int(state.leaves[i].step)
