"""Optimizers of torch and ours, side by side: the same steps, in every way to step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from functional_optim import Optimizer, TorchOptimizer
from functional_optim.core.state import LeafState
from functional_optim.testing.subject import plain_oracle
from tests.cases import CASES, Case
from tests.front_ends.support import CASES as TORCHS

from .support import like, noise, same_bits


class Twin(NamedTuple):
    """Optimizer of torch, and ours with the same hyper-parameters."""

    case: Case
    hyper: dict[str, Any]

    @property
    def ours(self) -> Optimizer:
        return self.case.factory(**self.hyper)

    def by_torch(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        oracle: Any = plain_oracle(self.case.oracle)
        made: torch.optim.Optimizer = oracle(params, **self.hyper)
        return made

    def taken(self, tensor: Tensor) -> Tensor:
        """Return the tensor, as a matrix if the optimizer needs matrices."""
        if not self.case.matrices or tensor.dim() == 2:
            return tensor
        return tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1)

    def apart(self, numbers: Tensor) -> list[Tensor]:
        """Return the numbers as parameters that cannot affect one another."""
        return list(numbers.reshape(-1, 1, 1)) if self.case.matrices else [numbers]


ORACLES = {one.oracle: one for one in CASES.values() if isinstance(one.oracle, type)}
TWINS = {name: Twin(ORACLES[cls], options) for name, (cls, options) in TORCHS.items()}
TWINS |= {
    "muon": Twin(CASES["muon"], {"lr": 0.1}),
    "muon as AdamW": Twin(
        CASES["muon"], {"lr": 0.1, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}
    ),
    "muon of two steps": Twin(
        CASES["muon"], {"lr": 0.1, "momentum": 0.0, "eps": 0.5, "ns_steps": 2, "weight_decay": 0.0}
    ),
    "sparse_adam": Twin(CASES["sparse_adam"], {"lr": 0.1}),
    "sparse_adam ascending": Twin(
        CASES["sparse_adam"], {"betas": (0.5, 0.7), "eps": 0.1, "maximize": True}
    ),
}
assert {one.case.oracle for one in TWINS.values()} == {*ORACLES}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t().contiguous().t(),
    "sliced": lambda t: torch.stack([t, t], 2)[..., 1],
    "expanded": lambda t: t[:1].expand(t.shape),
}
"""Layouts of matrices; parameters have all but the last."""


def matrix(seed: int, dtype: torch.dtype, layout: str) -> Tensor:
    """Return a matrix whose rows are longer than a processor's vectors, to test strides."""
    return LAYOUTS[layout](noise(seed, 33, 17, dtype=dtype))


class Stepped(NamedTuple):
    """Result of a step: the parameter's values, and its state if it can be seen."""

    param: Tensor
    state: LeafState | None = None


Way = Callable[[Optimizer, Tensor, list[Tensor]], Stepped]
"""Function of optimizer, parameter and gradients that returns the parameter after all steps."""


def pure(optimizer: Optimizer, param: Tensor, grads: list[Tensor]) -> Stepped:
    state = optimizer.init(param)
    for one in grads:
        param, state = optimizer.update(param, one, state)
    return Stepped(param, state.leaves)


def in_place(optimizer: Optimizer, param: Tensor, grads: list[Tensor]) -> Stepped:
    state = optimizer.init(param)
    for one in grads:
        optimizer.update_(param, one, state)
    return Stepped(param, state.leaves)


def front_end(optimizer: Optimizer, param: Tensor, grads: list[Tensor]) -> Stepped:
    made = nn.Parameter(param)
    front = TorchOptimizer([made], optimizer)
    for one in grads:
        made.grad = one
        front.step()
    return Stepped(made.detach())


def bound(optimizer: Optimizer, param: Tensor, grads: list[Tensor]) -> Stepped:
    steps = optimizer.bind(param)
    for one in grads:
        steps.step(one)
    return Stepped(param)


def assert_twins(twin: Twin, start: Tensor, grads: list[Tensor], ways: dict[str, Way]) -> None:
    """Assert that each way has torch's bits and strides, in the parameter and in its state."""
    theirs = nn.Parameter(like(start, start))
    torch_optimizer = twin.by_torch([theirs])
    for grad in grads:
        theirs.grad = grad
        torch_optimizer.step()
    for name, way in ways.items():
        executor: Any = name.partition(" by ")[2] or "reference"
        optimizer = twin.ours.using(executor=executor)
        made = way(optimizer, like(start, start), grads)
        assert same_bits(made.param, theirs), name
        assert made.param.stride() == theirs.stride(), name
        if made.state is not None:
            assert_state(made.state, torch_optimizer.state[theirs])


def assert_state(state: LeafState, theirs: dict[str, Any]) -> None:
    """Assert that our state has exactly the tensors of torch, and the same step count."""
    kept = {key: value for key, value in theirs.items() if value is not None}
    steps = kept.pop("step", state.step)
    assert int(steps) == int(state.step)
    for stage in state.stages:
        for field, value in (stage._asdict() if stage else {}).items():
            for tensor in value if isinstance(value, list) else [value]:
                assert same_bits(tensor, kept.pop(field)), field
    assert not kept
