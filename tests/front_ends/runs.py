"""Runs of an optimizer, and the forms in which a run can continue."""

import copy
import io
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional_optim import TorchOptimizer, as_functional_optim, from_torch, to_torch_state_dict

from .support import CASES, SHAPES, Params, grouped, noise, parameters, params_of, set_grads

KINDS = ("torch", "ours", "functional")
"""Forms of a run: torch's class, TorchOptimizer, and the pure update.

The pure update starts from ``from_torch``, and ends in ``to_torch_state_dict``.
"""


@dataclass(frozen=True)
class History:
    """Parameters of a run, and its steps before the checkpoint."""

    steps: Sequence[Collection[int]] = ((), ())
    """For each step, the indices of the parameters without a gradient."""
    after: Collection[int] = ()
    """Indices of the parameters without a gradient after the checkpoint."""
    dtype: torch.dtype = torch.float32
    shapes: Sequence[tuple[int, ...]] = SHAPES
    changed: Callable[[Params], Any] = list
    """Function that changes fresh parameters."""
    groups: Callable[[str], Callable[[Params], Any]] = lambda name: list

    def params(self) -> Params:
        """Return fresh parameters."""
        made: Params = self.changed(parameters(1, self.dtype, self.shapes))
        return made


def _first_frozen(params: Params) -> Params:
    params[0].requires_grad_(requires_grad=False)
    return params


def _strided(params: Params) -> Params:
    image = noise(0, 2, 3, 2, 2).to(memory_format=torch.channels_last)
    return [torch.nn.Parameter(image), torch.nn.Parameter(noise(1, 4, 5).t())]


HISTORIES = {
    "no step": History(steps=()),
    "one step": History(steps=((),)),
    "some without a gradient": History(steps=({1, 3}, {1, 3}), after={3}),
    "at different steps": History(steps=({0}, {0}, (), {2})),
    "groups": History(groups=grouped, steps=({2}, ())),
}
FORMS = {
    "float64": History(dtype=torch.float64, steps=({1},)),
    "bfloat16": History(dtype=torch.bfloat16, steps=({1}, ())),
    "float16": History(dtype=torch.float16, steps=({1},)),
    "named groups": History(groups=lambda name: grouped(name, named=True), steps=({1},)),
    "eleven parameters": History(shapes=[(k,) for k in range(1, 12)], steps=({2, 10},)),
    "frozen and empty ones": History(
        shapes=[(2,), (0, 3), ()], changed=_first_frozen, steps=({0}, {0}), after={0}
    ),
    "strides": History(changed=_strided),
}
"""Histories that vary the form of the parameters."""


class Functional:
    """Run of the pure update that ``from_torch`` makes from a live optimizer."""

    def __init__(self, live: torch.optim.Optimizer) -> None:
        self.optimizer, params, self.state = from_torch(live)
        # The live optimizer continues to step its own parameters.
        self.tree = tuple({n: p.detach().clone() for n, p in group.items()} for group in params)
        self.cls = type(live) if _is_told_apart(live) else None

    @property
    def params(self) -> list[Tensor]:
        return [leaf for group in self.tree for leaf in group.values()]

    def step(self, seed: int, without: Collection[int] = ()) -> None:
        held = [torch.nn.Parameter(leaf.detach()) for leaf in self.params]
        set_grads(held, seed, without)
        grads = iter([param.grad for param in held])
        given = tuple({name: next(grads) for name in group} for group in self.tree)
        self.tree, self.state = self.optimizer.update(self.tree, given, self.state)

    def state_dict(self) -> dict[str, Any]:
        return to_torch_state_dict(self.optimizer, self.tree, self.state, self.cls)


def _is_told_apart(live: torch.optim.Optimizer) -> bool:
    """Return True if another class has the same chain."""
    decouples = live.param_groups[0].get("decoupled_weight_decay", False)
    return type(live) is torch.optim.Adam and bool(decouples)


class Live:
    """Run of one of torch's classes, or of TorchOptimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def params(self) -> list[Tensor]:
        return params_of(self.optimizer)

    def step(self, seed: int, without: Collection[int] = ()) -> None:
        set_grads(self.params, seed, without)
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


Run = Live | Functional


def optimizer_of(kind: str, case: str, given: Any, options: dict[str, Any]) -> Any:
    """Return a TorchOptimizer, or an optimizer of torch."""
    cls: Any = CASES[case][0]
    if kind == "ours":
        return TorchOptimizer(given, as_functional_optim(cls, **options))
    return cls(given, **options, foreach=False)


def begun(kind: str, case: str, history: History) -> Run:
    """Return a run without steps."""
    given = history.groups(case)(history.params())
    optimizer = optimizer_of(kind, case, given, CASES[case][1])
    return Functional(optimizer) if kind == "functional" else Live(optimizer)


def resumed(kind: str, case: str, one: Run, through: str) -> Run:
    """Continue a run in another form, from its state dict.

    The new optimizer has another lr until it loads the state dict.
    """
    if kind == "functional" and isinstance(one, Live) and type(one.optimizer) is CASES[case][0]:
        return Functional(one.optimizer)
    written = WAYS[through](one.state_dict())
    fresh = iter([torch.nn.Parameter(param.detach().clone()) for param in one.params])
    groups = [{"params": [next(fresh) for _ in g["params"]]} for g in written["param_groups"]]
    options = {"lr": 0.7}
    if kind == "ours" and "decoupled_weight_decay" in CASES[case][1]:
        options["decoupled_weight_decay"] = True  # a state dict cannot change the chain
    optimizer = optimizer_of(kind, case, groups, options)
    optimizer.load_state_dict(written)
    return Functional(optimizer) if kind == "functional" else Live(optimizer)


def _through_a_file(written: Any) -> Any:
    """Save to a file, and load with the defaults of torch.load."""
    file = io.BytesIO()
    torch.save(written, file)
    file.seek(0)
    return torch.load(file)


# torch's classes keep the tensors that they load: without a copy, both runs would step them.
WAYS: dict[str, Callable[[Any], Any]] = {"copy": copy.deepcopy, "file": _through_a_file}
