"""Rules whose state fields depend on the shape of the parameter, as in Adafactor and Shampoo."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import Optimizer, Rule, chain


class Hyper(NamedTuple):
    lr: float
    decay: float


class Factored(NamedTuple):
    """State as in Adafactor: row and column means of a matrix, or all elements of other shapes."""

    row: list[Tensor]
    column: list[Tensor]
    full: list[Tensor]


def factored_init(param: Tensor, hyper: Hyper) -> Factored:
    if param.dim() >= 2:
        row, column = param.new_zeros(param.shape[:-1]), param.new_zeros(param.shape[-1:])
        return Factored([row], [column], [])
    return Factored([], [], [torch.zeros_like(param)])


def factored_rule(
    param: Tensor, grad: Tensor, state: Factored, c: Hyper
) -> tuple[Tensor, Factored]:
    square = grad.square() + 1e-8
    if state.full:
        full = state.full[0].lerp(square, 1.0 - c.decay)
        return param - c.lr * grad * full.rsqrt(), Factored([], [], [full])
    dims = list(range(param.dim() - 1))
    row = state.row[0].lerp(square.mean(-1), 1.0 - c.decay)
    column = state.column[0].lerp(square.mean(dims), 1.0 - c.decay)
    scale = (row / row.mean()).rsqrt().unsqueeze(-1) * column.rsqrt()
    return param - c.lr * grad * scale, Factored([row], [column], [])


class Sided(NamedTuple):
    """State as in Shampoo: a square matrix for each dimension that is not too long."""

    sides: list[Tensor]
    momentum: Tensor


LONGEST = 8


def sided_init(param: Tensor, hyper: Hyper) -> Sided:
    sides = [torch.eye(n, dtype=param.dtype, device=param.device) for n in short_sides(param)]
    return Sided(sides, torch.zeros_like(param))


def short_sides(param: Tensor) -> list[int]:
    return [n for n in param.shape if n <= LONGEST]


def sided_rule(param: Tensor, grad: Tensor, state: Sided, c: Hyper) -> tuple[Tensor, Sided]:
    sides = list(state.sides)
    places = [k for k, n in enumerate(param.shape) if n <= LONGEST]
    step = grad
    for index, place in enumerate(places):
        flat = grad.movedim(place, 0).reshape(param.shape[place], -1)
        sides[index] = c.decay * sides[index] + flat @ flat.t() / max(1, flat.shape[1])
        turned = torch.tensordot(sides[index], step, dims=([1], [place]))
        step = turned.movedim(0, place) / (1.0 + sides[index].abs().sum())
    momentum = c.decay * state.momentum + step
    return param - c.lr * momentum, Sided(sides, momentum)


class Kept(NamedTuple):
    """Momentum of matrices; other parameters have no state."""

    buf: list[Tensor]


def matrices_init(param: Tensor, hyper: Hyper) -> Kept:
    return Kept([torch.zeros_like(param)] if param.dim() >= 2 else [])


def matrices_rule(param: Tensor, grad: Tensor, state: Kept, c: Hyper) -> tuple[Tensor, Kept]:
    """Step each element alone, with momentum if the parameter has a buffer."""
    if not state.buf:
        return param - c.lr * grad, state
    buf = c.decay * state.buf[0] + grad
    return param - c.lr * buf, Kept([buf])


def of(name: str, state: Any, init: Any, rule: Any, kind: Any) -> Optimizer:
    stage = Rule(name=name, hyper=Hyper, state=state, init=init, rule=rule, kind=kind)
    return chain(stage(lr=0.05, decay=0.9))


RULES: dict[str, Optimizer] = {
    "factored": of("factored", Factored, factored_init, factored_rule, "per_matrix"),
    "sided": of("sided", Sided, sided_init, sided_rule, "per_matrix"),
    "matrices": of("matrices", Kept, matrices_init, matrices_rule, "pointwise"),
}
