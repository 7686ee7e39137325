"""Optimizers that are compared: ours, each peer's, and the floor's, with equal hyper-parameters."""

import importlib
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.errors import Absent
from benchmarks.peers.lion import Lion
from benchmarks.peers.qhm import QHM, ClippedQHM
from functional_optim import Optimizer, adagrad, adamw, chain, clip_by_value, lion, qhm, sgd

Step = Callable[[], object]

LR = 1e-4
MOMENTUM = 0.9
DECAY = 0.01
CLIP = 1.0
NU = 0.7


class FloorLoop(NamedTuple):
    """Loop in C."""

    kernel: str
    states: int
    coefficients: Callable[[int], Sequence[float]]
    varying: bool = False
    """True if the coefficients change with the step."""


class OptimizerCase(NamedTuple):
    """Optimizer, in all its implementations."""

    name: str
    bytes_per_parameter: int
    """The least memory traffic of a step in float32, if every value is read once and written
    once."""
    ours: Callable[[], Optimizer]
    torch_class: Callable[..., Any]
    """Called as ``torch_class(params, foreach=...)``, and with ``fused=True`` if ``fused`` is
    set."""
    floor: FloorLoop
    fused: bool = False
    functional: Callable[[list[Tensor]], Any] | None = None
    torchopt: Callable[[list[Tensor], list[Tensor]], Step] | None = None


def _functional(module: str, name: str, **options: Any) -> Callable[[list[Tensor]], Any]:
    """Return a builder of one of torch's scripted functional classes."""

    def build(params: list[Tensor]) -> Any:
        # torch warns at each use that TorchScript ends, and a plain filter does not hide this.
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("ignore")
            found = importlib.import_module(f"torch.distributed.optim.functional_{module}")
            return getattr(found, name)(params, **options)

    return build


def _torchopt(name: str, **options: Any) -> Callable[[list[Tensor], list[Tensor]], Step]:
    """Return a builder of a step by one of TorchOpt's functions.

    TorchOpt's classes overwrite the gradients. Further steps with the same gradients would soon be
    steps by zero.

    Raises:
        Absent: TorchOpt is missing when the builder is called.
    """

    def build(params: list[Tensor], grads: list[Tensor]) -> Step:
        try:
            torchopt = importlib.import_module("torchopt")
        except ImportError as error:
            raise Absent(f"TorchOpt cannot be imported: {error}") from error
        transformation = getattr(torchopt, name)(**options)
        state = transformation.init(params)

        def step() -> None:
            nonlocal state
            updates, state = transformation.update(grads, state, params=params, inplace=False)
            torchopt.apply_updates(params, updates, inplace=True)

        return step

    return build


def _adamw_numbers(step: int) -> tuple[float, ...]:
    beta_1, beta_2 = 0.9, 0.999
    root = math.sqrt(1 - beta_2**step)
    return (1 - LR * DECAY, beta_1, beta_2, root, 1e-8, LR / (1 - beta_1**step))


QHM_OPTIONS: dict[str, Any] = {"lr": LR, "momentum": MOMENTUM, "nu": NU}
CHAIN_OPTIONS = {**QHM_OPTIONS, "weight_decay": DECAY}


def _chain() -> Optimizer:
    return chain(clip_by_value(CLIP), qhm(LR, MOMENTUM, NU, weight_decay=DECAY))


CASES: dict[str, OptimizerCase] = {
    one.name: one
    for one in (
        OptimizerCase(
            "SGD",
            12,
            lambda: sgd(lr=LR),
            lambda params, **how: torch.optim.SGD(params, lr=LR, **how),
            FloorLoop("sgd", 0, lambda _: (LR,)),
            fused=True,
            functional=_functional("sgd", "_FunctionalSGD", lr=LR),
            torchopt=_torchopt("sgd", lr=LR),
        ),
        OptimizerCase(
            "SGD + momentum",
            20,
            lambda: sgd(lr=LR, momentum=MOMENTUM),
            lambda params, **how: torch.optim.SGD(params, lr=LR, momentum=MOMENTUM, **how),
            FloorLoop("momentum", 1, lambda _: (LR, MOMENTUM)),
            fused=True,
            functional=_functional("sgd", "_FunctionalSGD", lr=LR, momentum=MOMENTUM),
            torchopt=_torchopt("sgd", lr=LR, momentum=MOMENTUM),
        ),
        OptimizerCase(
            "AdamW",
            28,
            lambda: adamw(lr=LR, weight_decay=DECAY),
            lambda params, **how: torch.optim.AdamW(params, lr=LR, weight_decay=DECAY, **how),
            FloorLoop("adamw", 2, _adamw_numbers, varying=True),
            fused=True,
            functional=_functional("adamw", "_FunctionalAdamW", lr=LR, weight_decay=DECAY),
            torchopt=_torchopt("adamw", lr=LR, weight_decay=DECAY),
        ),
        OptimizerCase(
            "Adagrad",
            20,
            lambda: adagrad(lr=LR),
            lambda params, **how: torch.optim.Adagrad(params, lr=LR, **how),
            FloorLoop("adagrad", 1, lambda _: (LR, 1e-10)),
            fused=True,
            functional=_functional("adagrad", "_FunctionalAdagrad", lr=LR),
            torchopt=_torchopt("adagrad", lr=LR),
        ),
        OptimizerCase(
            "Lion",
            20,
            lambda: lion(lr=LR, weight_decay=DECAY),
            lambda params, **how: Lion(params, lr=LR, weight_decay=DECAY, **how),
            FloorLoop("lion", 1, lambda _: (1 - LR * DECAY, LR, 0.9, 0.99)),
        ),
        OptimizerCase(
            "QHM",
            20,
            lambda: qhm(LR, MOMENTUM, NU),
            lambda params, **how: QHM(params, **QHM_OPTIONS, **how),
            FloorLoop("qhm", 1, lambda _: (LR, MOMENTUM, NU, 0.0, math.inf)),
        ),
        OptimizerCase(
            "clip + decay + QHM",
            20,
            _chain,
            lambda params, **how: ClippedQHM(params, CLIP, **CHAIN_OPTIONS, **how),
            FloorLoop("qhm", 1, lambda _: (LR, MOMENTUM, NU, DECAY, CLIP)),
        ),
    )
}
