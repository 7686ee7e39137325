"""A tree of a few leaves, its gradients, and runs over it."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from functional_optim import (
    Optimizer,
    State,
    accumulate,
    adamw,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    ema,
    freeze,
    if_any,
    lookahead,
    masked,
    matching,
    on_global_step,
    partition,
    prodigy,
    sam,
    schedule_free_sgd,
    sgd,
    weight_decay,
    with_shape,
)
from functional_optim.schedules import linear

from ..tensors import normal

Tree = dict[str, Any]

SHAPES = {"body.weight": (6, 5), "body.bias": (6,), "head.weight": (4, 4), "scale": ()}
STEPS = 7


def params_of(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Tree:
    return {name: normal(*shape, seed=k) for k, (name, shape) in enumerate(shapes.items())}


def grads_at(step: int, *, missing: Mapping[int, str] | None = None) -> Tree:
    """Return the gradients of a step, counted from 0. One gradient may be missing in a step."""
    found: Tree = {
        name: normal(*shape, seed=100 * (step + 1) + k)
        for k, (name, shape) in enumerate(SHAPES.items())
    }
    if missing and step in missing:
        found[missing[step]] = None
    return found


PERIOD = 6
"""Number of steps after which all gates and masks repeat."""
MASKS = ({"scale"}, set(), {"body.bias"}, set(), {"body.bias", "scale"}, set())
"""Names of the leaves without a gradient, for each step of the period."""


def grads_without(step: int, missing: set[str]) -> Tree:
    return {k: None if k in missing else grad for k, grad in grads_at(step).items()}


def lrs_at(optimizer: Optimizer, step: int) -> dict[str, float]:
    """Return new learning rates for a step, for each learning rate that is a number."""
    values = optimizer.hyper.items()
    names = [k for k, v in values if k.split(".")[-1] == "lr" and isinstance(v, float)]
    return dict.fromkeys(names, 0.1 / (step + 1))


HOLES = {2: "body.bias", 3: "body.bias", 4: "scale"}


def run_of(
    optimizer: Optimizer, steps: int = STEPS, missing: Mapping[int, str] | None = None
) -> tuple[Tree, State]:
    params: Any = params_of()
    state = optimizer.init(params)
    for step in range(steps):
        params, state = optimizer.update(params, grads_at(step, missing=missing), state)
    return params, state


def kind(path: tuple[Any, ...], shape: tuple[int, ...]) -> str:
    return "matrices" if len(shape) == 2 else "rest"


def two_parts() -> Optimizer:
    return partition({"matrices": sgd(0.1, momentum=0.9), "rest": adamw(0.01)}, kind)


COMPOSED: dict[str, Callable[[], Optimizer]] = {
    "parts": two_parts,
    "clip over parts": lambda: chain(clip_by_global_norm(0.5), two_parts()),
    "frozen": lambda: chain(freeze(if_any(matching("head*"))), clip_by_global_norm(0.5), sgd(0.1)),
    "masked decay": lambda: chain(
        masked(weight_decay(0.1), with_shape(lambda shape: len(shape) == 2)), adamw(0.1)
    ),
    "accumulate": lambda: chain(accumulate(3), clip_by_global_norm(0.5), adamw(0.01)),
    "finite": lambda: chain(apply_if_finite(2), adamw(0.01)),
    "finite batches": lambda: chain(accumulate(2), apply_if_finite(2), adamw(0.01), ema(0.9)),
    "sam": lambda: chain(sam(0.1), sgd(0.1, momentum=0.9)),
    "lookahead": lambda: chain(adamw(0.1), lookahead(3)),
    "one name twice": lambda: chain(accumulate(2), sgd(0.1, momentum=0.9), lookahead(3)),
    "batches of parts": lambda: chain(accumulate(2), two_parts(), ema(0.9)),
    "gates in gates": lambda: chain(
        apply_if_finite(2), accumulate(3), sam(0.1), schedule_free_sgd(0.1)
    ),
    "batches at a global step": lambda: chain(
        accumulate(2), prodigy(on_global_step(linear(1.0, to=0.5, steps=3)), d0=1e-2)
    ),
    "global step": lambda: adamw(on_global_step(linear(0.1, to=0.0, steps=9))),
}
"""Composed optimizers, with each kind of composition at least once."""


def after(params: Tree, name: str) -> Tensor:
    found: Tensor = params[name]
    return found
