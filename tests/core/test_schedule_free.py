"""Schedule-free SGD and AdamW, compared with their authors' package; views and populations."""

import io
import math
from collections.abc import Callable
from typing import Any

import torch
from schedulefree import AdamWScheduleFree, SGDScheduleFree
from torch import Tensor, nn

from functional_optim import Optimizer, schedule_free_adamw, schedule_free_sgd

from ..choices import case, pairs
from .support import assert_differ, assert_same, noise

SHAPES: dict[str, tuple[int, ...]] = {"b": (11,), "e": (0, 3), "s": (), "w": (5, 7)}
BOTH: dict[str, tuple[Callable[..., Optimizer], Callable[..., Any]]] = {
    "sgd": (schedule_free_sgd, SGDScheduleFree),
    "adamw": (schedule_free_adamw, AdamWScheduleFree),
}
Tree = dict[str, Any]


def start(dtype: torch.dtype) -> Tree:
    return {name: noise(k, *shape, dtype=dtype) for k, (name, shape) in enumerate(SHAPES.items())}


def gradient(params: Tree, step: int) -> Tree:
    """Return the gradients of a noisy square, some or all of them missing at some steps."""
    return {
        name: None
        if step == 4 or (name == "b" and step % 3 == 0)
        else param + 0.5 * noise(100 + 10 * step + k, *param.shape, dtype=param.dtype)
        for k, (name, param) in enumerate(params.items())
    }


def hyper_of(kind: str, one: Tree) -> Tree:
    """Return the options by the names that this kind of optimizer uses."""
    hyper = {name: value for name, value in one.items() if name not in {"kind", "b", "dtype"}}
    return hyper | ({"momentum": one["b"]} if kind == "sgd" else {"betas": (one["b"], 0.9)})


OPTIONS: Tree = {
    "kind": list(BOTH),
    "dtype": [torch.float64, torch.float32, torch.bfloat16],
    "b": [0.9, 0.3],
    "lr": [0.1, 1.0, 0.0],
    "weight_decay": [0.0, 0.1],
    "warmup_steps": [0, 1, 7],
    "r": [0.0, 1.5],
    "weight_lr_power": [2.0, 0.0, 1.0],
}


def saved_and_loaded(*trees: Any) -> Any:
    file = io.BytesIO()
    torch.save(trees, file)
    file.seek(0)
    return torch.load(file)


def test_it_is_its_authors_package_to_the_bit() -> None:
    """Parameters, state, shared numbers and evaluated parameters have the bits of the package.

    The runs save and reload their state. They are compared with torch's loops and, except in 16
    bits, with its lists of tensors, which round differently there.
    """
    for one in pairs(**OPTIONS, foreach=[False, True]):
        kind, dtype, foreach = one["kind"], one["dtype"], one.pop("foreach")
        foreach = foreach and dtype.itemsize > 2
        hyper = hyper_of(kind, one)
        ours, theirs = BOTH[kind]
        optimizer, params = ours(**hyper), start(dtype)
        state = optimizer.init(params)
        twins = {name: nn.Parameter(param.clone()) for name, param in params.items()}
        twin = theirs(list(twins.values()), foreach=foreach, **hyper)
        twin.train()
        for step in range(20):
            grads = gradient({name: kept.detach() for name, kept in twins.items()}, step)
            for name, kept in twins.items():
                kept.grad = None if grads[name] is None else grads[name].clone()
            twin.step()
            params, state = optimizer.update(params, grads, state)
            if step % 7 == 3:
                params, state = saved_and_loaded(params, state)
        (shared,) = optimizer.shared(state).values()
        with case(foreach=foreach, **one):
            assert_same(params, {name: kept.detach() for name, kept in twins.items()})
            for name, kept in twins.items():
                own = state.leaves[name].stages[-1]
                assert {*own._fields} == {*twin.state[kept]}
                assert_same(own._asdict(), {key: twin.state[kept][key] for key in own._fields})
            for field in ("k", "weight_sum", "lr_max"):
                assert getattr(shared, field) == twin.param_groups[0][field], field
            before = {name: param.clone() for name, param in params.items()}
            twin.eval()
            seen = optimizer.view(params, state)
            assert_same(seen, {name: kept.detach() for name, kept in twins.items()})
            assert_same(params, before)
            if hyper["lr"] > 0.0:
                assert_differ(seen, params)


def test_a_view_knows_schedules_and_tensors() -> None:
    """The view takes hyper-parameters of the leaf's last step, or of its first before any step."""
    half = torch.tensor(0.5, dtype=torch.float64)
    numbers = schedule_free_adamw(0.1, (0.5, 0.9))
    moving: list[Any] = [(half, half + 0.4), (0.5, lambda made: 0.9), (lambda made: 0.5, 0.9)]
    for betas in moving:
        optimizer = schedule_free_adamw(lambda made: 0.1, betas)
        params = twin = noise(0, 4)
        state, own = numbers.init(twin), optimizer.init(params)
        for step in range(3):
            with case(betas=betas, step=step):
                assert_same(optimizer.view(params, own), numbers.view(twin, state))
            params, own = optimizer.update(params, noise(step, 4), own)
            twin, state = numbers.update(twin, noise(step, 4), state)


def test_a_derivative_of_the_parameters_makes_no_other_numbers_of_the_shared_ones() -> None:
    """torch.func.grad wraps all tensors that are computed inside, so shared numbers stay floats."""
    optimizer, start_at = schedule_free_sgd(r=-0.5), torch.zeros((), dtype=torch.float64)
    types: list[type] = []

    def total(params: Tensor) -> Tensor:
        state = optimizer.init(params)
        for _ in range(3):
            params, state = optimizer.update(params, torch.zeros_like(params), state)
            types.extend(map(type, optimizer.shared(state)["schedule_free_sgd"]))
        return params.sum()

    got = torch.func.grad(total)(start_at)
    assert {*types} == {float}
    leaf = start_at.clone().requires_grad_()
    assert_same(got, torch.autograd.grad(total(leaf), leaf)[0])


def test_a_population_has_weights_of_its_own() -> None:
    """vmap over learning rates, including 0, equals the loop."""
    for kind, (make, _) in BOTH.items():
        optimizer, rates = make(warmup_steps=2), torch.tensor([0.1, 0.0, 1.0]).double()
        param, grads = noise(0, 5), [noise(step, 5) for step in range(1, 5)]

        def trained(rate: Any, optimizer: Any = optimizer, p: Any = param, g: Any = grads) -> Any:
            state = optimizer.init(p)
            for one in g:
                p, state = optimizer.update(p, one, state, lr=rate)
            return p, optimizer.view(p, state), state.shared.stages

        found = torch.func.vmap(trained)(rates)
        for index, rate in enumerate(rates.tolist()):
            p, seen, (*_, shared) = trained(rate)
            with case(kind=kind, rate=rate):
                torch.testing.assert_close(found[0][index], p, rtol=1e-13, atol=1e-15)
                torch.testing.assert_close(found[1][index], seen, rtol=1e-13, atol=1e-15)
                torch.testing.assert_close(
                    torch.stack([one.expand(3)[index] for one in found[2][-1]]),
                    torch.stack(list(shared)),
                    rtol=1e-14,
                    atol=0,
                )
    assert math.isfinite(float(found[0].sum()))
