"""Support of these tests: torch's classes with options, twin optimizers, exact comparison."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional_optim import TorchOptimizer, as_functional_optim
from functional_optim.frontends.torch_arguments import EXECUTION_OPTIONS

from ..tensors import bits, noise, same_bits  # noqa: F401  for the tests

CLASSES: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Adafactor,
)
"""Torch's classes that accept parameters of any shape."""

REGISTERED = (*CLASSES, torch.optim.Muon, torch.optim.SparseAdam)

Case = tuple[type[torch.optim.Optimizer], dict[str, Any]]

CASES: dict[str, Case] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD decay maximize": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.2, "maximize": True}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.1, "betas": (0.6, 0.7), "amsgrad": True}),
    "Adam decoupled": (
        torch.optim.Adam,
        {"lr": 0.1, "weight_decay": 0.3, "decoupled_weight_decay": True},
    ),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.3}),
    "AdamW amsgrad maximize": (
        torch.optim.AdamW,
        {"lr": 0.1, "amsgrad": True, "maximize": True, "eps": 1e-3},
    ),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "Adagrad decays": (
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.2, "weight_decay": 0.1, "initial_accumulator_value": 0.3},
    ),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5, "rho": 0.8, "weight_decay": 0.1}),
    "Adadelta maximize": (torch.optim.Adadelta, {"eps": 1e-3, "maximize": True}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1, "weight_decay": 0.1}),
    "Adamax maximize": (torch.optim.Adamax, {"betas": (0.5, 0.6), "maximize": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "alpha": 0.8}),
    "RMSprop momentum": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "RMSprop centered": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
    "Rprop etas maximize": (
        torch.optim.Rprop,
        {"etas": (0.4, 1.5), "step_sizes": (0.001, 0.05), "maximize": True},
    ),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1, "momentum_decay": 0.3, "weight_decay": 0.1}),
    "NAdam decoupled": (
        torch.optim.NAdam,
        {"lr": 0.1, "weight_decay": 0.3, "decoupled_weight_decay": True, "maximize": True},
    ),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1, "betas": (0.6, 0.9), "weight_decay": 0.1}),
    "RAdam decoupled": (
        torch.optim.RAdam,
        {"lr": 0.1, "weight_decay": 0.3, "decoupled_weight_decay": True, "maximize": True},
    ),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1, "t0": 1, "weight_decay": 0.1}),
    "ASGD maximize": (torch.optim.ASGD, {"lambd": 0.3, "alpha": 0.2, "t0": 0, "maximize": True}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1, "weight_decay": 0.1}),
    "Adafactor maximize": (
        torch.optim.Adafactor,
        {"lr": 0.1, "eps": (0.1, 0.5), "d": 1.5, "maximize": True},
    ),
}
"""Every class with every option that changes its values or its state."""

ONE_EACH = [
    "SGD momentum",
    "Adam amsgrad",
    "AdamW",
    "Adagrad decays",
    "Adadelta",
    "Adamax",
    "RMSprop centered",
    "Rprop",
    "NAdam",
    "RAdam",
    "ASGD",
    "Adafactor",
]
"""One case of each class, for laws that need no more."""

OTHER: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.01, "weight_decay": 0.5, "maximize": True},
    "Adam": {"lr": 0.01, "betas": (0.5, 0.6), "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.0, "eps": 1e-4},
    "Adagrad": {"lr": 0.01, "lr_decay": 0.1},
    "Adadelta": {"lr": 0.2, "rho": 0.5},
    "Adamax": {"lr": 0.01, "betas": (0.1, 0.2)},
    "RMSprop": {"lr": 0.01, "alpha": 0.5, "centered": True},
    "Rprop": {"etas": (0.3, 1.7), "step_sizes": (0.01, 0.02)},
    "NAdam": {"lr": 0.01, "betas": (0.5, 0.6), "momentum_decay": 0.1},
    "RAdam": {"lr": 0.01, "betas": (0.5, 0.95), "eps": 1e-4},
    "ASGD": {"lr": 0.01, "lambd": 0.1, "t0": 2},
    "Adafactor": {"lr": 0.01, "eps": (None, 1e-2), "beta2_decay": -0.5},
}
"""Options of the second group, for each class."""

SHAPES: tuple[tuple[int, ...], ...] = ((3, 4), (37,), (), (2, 3))

Params = list[torch.nn.Parameter]


def parameters(
    seed: int = 1, dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> Params:
    """Return fresh parameters, with values that depend only on the seed."""
    return [
        torch.nn.Parameter(noise(100 * seed + i, *shape, dtype=dtype))
        for i, shape in enumerate(shapes)
    ]


def set_grads(params: Sequence[Tensor], seed: int, without: Collection[int] = ()) -> None:
    """Set a new gradient for each parameter, and None for the indices in ``without``."""
    for i, param in enumerate(params):
        grad = noise(7919 * (seed + 1) + i, *param.shape, dtype=param.dtype)
        param.grad = None if i in without else grad


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer, group by group."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def values_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return copies of the parameters of an optimizer."""
    return [param.detach().clone() for param in params_of(optimizer)]


def run(optimizer: torch.optim.Optimizer, *seeds: int, without: Collection[int] = ()) -> None:
    """Make a step with the gradients of each seed."""
    for seed in seeds:
        set_grads(params_of(optimizer), seed, without)
        optimizer.step()


def assert_same_tensors(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Check that two lists of tensors have the same bits."""
    assert len(got) == len(want)
    for index, (one, two) in enumerate(zip(got, want, strict=True)):
        assert same_bits(one, two), f"tensor {index}: {one} is not {two}"


def assert_same_params(got: torch.optim.Optimizer, want: torch.optim.Optimizer) -> None:
    assert_same_tensors(params_of(got), params_of(want))


def assert_same_entries(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    """Check that our state of one parameter equals torch's.

    Step counts are compared as numbers. Where torch has no step count (SGD), ours is ignored.
    """
    if "step" in want:
        assert float(got["step"]) == float(want["step"])
    fields = {key for key, value in want.items() if value is not None} - {"step"}
    assert got.keys() - {"step"} == fields
    for key in fields:
        assert same_bits(got[key], want[key]), f"{key}: {got[key]} is not {want[key]}"


@dataclass
class Twins:
    """One of torch's optimizers and ours, over parameters with equal values."""

    theirs: torch.optim.Optimizer
    ours: TorchOptimizer

    @property
    def both(self) -> tuple[TorchOptimizer, torch.optim.Optimizer]:
        """Return our optimizer first."""
        return self.ours, self.theirs

    def step(self, *seeds: int, without: Collection[int] = ()) -> None:
        """Make steps of both optimizers, with the same new gradients."""
        for optimizer in self.both:
            run(optimizer, *seeds, without=without)

    def each(self, change: Callable[[torch.optim.Optimizer], Any]) -> None:
        """Apply a change to both optimizers."""
        for optimizer in self.both:
            change(optimizer)

    def assert_same(self) -> None:
        """Check that parameters are equal, and state where torch has created any."""
        assert_same_params(self.ours, self.theirs)
        for ours, theirs in zip(params_of(self.ours), params_of(self.theirs), strict=True):
            assert ours.stride() == theirs.stride()
            if self.theirs.state.get(theirs):
                assert_same_entries(self.ours.state[ours], self.theirs.state[theirs])


def twins(
    case: str | Case,
    dtype: torch.dtype = torch.float32,
    groups: Callable[[Params], Any] = list,
    *,
    executor: Any = None,
) -> Twins:
    """Return both optimizers for a case.

    ``groups`` makes the argument of both constructors from the parameters.
    """
    cls, options = CASES[case] if isinstance(case, str) else case
    made: Any = cls
    chain = as_functional_optim(cls, **options).using(executor=executor)
    return Twins(
        made(groups(parameters(1, dtype)), **{**options, "foreach": False}),
        TorchOptimizer(groups(parameters(1, dtype)), chain),
    )


def grouped(case: str, *, named: bool = False) -> Callable[[Params], list[dict[str, Any]]]:
    """Return a function that makes three groups, the second with other options."""

    def groups(params: Params) -> list[dict[str, Any]]:
        given = [(f"p{i}", one) for i, one in enumerate(params)] if named else params
        other = OTHER[CASES[case][0].__name__]
        return [{"params": given[:1]}, {"params": given[1:3], **other}, {"params": given[3:]}]

    return groups


def assert_same_written(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    """Check that our state dict has torch's entries, dtypes of step counts, and options."""
    for number, entries in want["state"].items():
        assert_same_entries(got["state"][number], entries)
        if "step" in entries and "step" in got["state"][number]:
            assert got["state"][number]["step"].dtype == entries["step"].dtype
    for mine, theirs in zip(got["param_groups"], want["param_groups"], strict=True):
        shared = (mine.keys() & theirs.keys()) - {*EXECUTION_OPTIONS}
        assert shared >= {"params", "lr"}
        assert {key: mine[key] for key in shared} == {key: theirs[key] for key in shared}
