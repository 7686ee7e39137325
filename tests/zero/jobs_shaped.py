"""What the ranks do: step rules that keep other fields for other shapes, beside one process."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from functional_optim import Optimizer, Rule, chain
from functional_optim.torch_state import to_entries
from sharding import ZeroRedundancyOptimizer
from sharding.zero.read import read_state_dict

from .jobs import differing, digest, same


class Hyper(NamedTuple):
    lr: float
    decay: float


class Factored(NamedTuple):
    """As in Adafactor: rows and columns of a matrix, every element of all else."""

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
    """As in Shampoo: a matrix for each side that is not too long."""

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
    """Of matrices alone."""

    buf: list[Tensor]


def matrices_init(param: Tensor, hyper: Hyper) -> Kept:
    return Kept([torch.zeros_like(param)] if param.dim() >= 2 else [])


def matrices_rule(param: Tensor, grad: Tensor, state: Kept, c: Hyper) -> tuple[Tensor, Kept]:
    """Element by element, with momentum where there is some."""
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
SHAPES = {
    "wide": (30, 17),
    "small": (4, 6),
    "cube": (3, 5, 9),
    "long": (71,),
    "short": (5,),
    "number": (),
}


def values(seed: int) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=chance) for name, shape in SHAPES.items()}


def made(rule: str, views: bool, start: dict[str, Tensor]) -> Any:
    params = {name: nn.Parameter(one.clone()) for name, one in start.items()}
    return ZeroRedundancyOptimizer(
        list(params.items()), RULES[rule], parameters_as_bucket_view=views
    )


def give(zero: Any, step: int) -> None:
    for (name, param), (_, grad) in zip(
        zero.params.items(), values(100 + step).items(), strict=True
    ):
        param.grad = None if (step, name) == (1, "small") else grad.clone()


def twin(rule: str, steps: int) -> tuple[dict[str, Tensor], Any]:
    """What one process makes of it."""
    optimizer, params = RULES[rule], values(0)
    state = optimizer.init(params)
    for step in range(steps):
        grads: dict[str, Any] = values(100 + step)
        if step == 1:
            grads["small"] = None
        params, state = optimizer.update(params, grads, state)
    return params, state


def shaped(rule: str, views: bool, folder: str) -> dict[str, Any]:
    """Six steps; in the middle the state is collected, saved, and loaded by others."""
    zero = made(rule, views, values(0))
    wrong: list[str] = []
    for step in range(3):
        give(zero, step)
        zero.step()
        wrong += [f"step {step}: {n}" for n in differing(zero.params, twin(rule, step + 1)[0])]
    zero.save(Path(folder))
    zero.consolidate_state_dict(to=0)
    again, loaded = (made(rule, views, zero.params) for _ in range(2))
    again.load(Path(folder))
    if zero.rank == 0:
        wrong += entries_that_differ(rule, zero.state_dict())
        wrong += entries_that_differ(rule, read_state_dict(folder))
    box: list[Any] = [zero.state_dict() if zero.rank == 0 else None]
    torch.distributed.broadcast_object_list(box, src=0)
    loaded.load_state_dict(box[0])
    for step in range(3, 6):
        for one in (zero, again, loaded):
            give(one, step)
            one.step()
    want, _ = twin(rule, 6)
    for label, one in (("zero", zero), ("load", again), ("load_state_dict", loaded)):
        wrong += [f"{label}: {name}" for name in differing(one.params, want)]
    return {"wrong": wrong, "digest": digest(zero.params)}


def entries_that_differ(rule: str, state_dict: Any) -> list[str]:
    """What was collected, beside the state of one process."""
    optimizer = RULES[rule]
    params, state = twin(rule, 3)
    wrong = []
    for number, (name, param) in enumerate(params.items()):
        leaf = state.leaves[name]
        want = to_entries(optimizer.stages, optimizer.hypers_at(()), param, leaf)
        found = state_dict["state"].get(number, {})
        if set(found) != set(want):
            wrong.append(f"{name}: {sorted(found)} for {sorted(want)}")
        wrong += [
            f"{name}: {key}"
            for key in set(want) & set(found) - {"step"}
            if not same(found[key], want[key])
        ]
    return wrong
