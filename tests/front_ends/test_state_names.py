"""Names of state: unique for each tensor in every front-end, even if a stage occurs twice."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    Rule,
    TorchOptimizer,
    Transform,
    chain,
    clip_by_global_norm,
    sgd,
    stored,
)
from functional_optim.core.links import state_names
from functional_optim.core.torch_state import from_entries, to_entries
from functional_optim.storage import describe
from sharding import ZeroRedundancyOptimizer
from tests import checkpoints
from tests.choices import each

from .support import noise, same_bits


class TraceHyper(NamedTuple):
    decay: float


class TraceState(NamedTuple):
    buf: Tensor


def trace_stage(name: str, dtype: torch.dtype | None = None) -> Transform:
    """Return a stage that keeps a decaying sum of gradients, in the given dtype if any."""

    def init(param: Tensor, hyper: TraceHyper) -> TraceState:
        return TraceState(torch.zeros_like(param, dtype=dtype))

    def transform(
        grad: Tensor, param: Tensor, state: TraceState, c: TraceHyper
    ) -> tuple[Tensor, TraceState]:
        buf = state.buf * c.decay + grad
        return buf.to(grad.dtype), TraceState(buf)

    return Transform(name=name, hyper=TraceHyper, state=TraceState, init=init, transform=transform)


trace, other, double = (
    trace_stage("trace"),
    trace_stage("other"),
    trace_stage("double", torch.float64),
)


def twice() -> Optimizer:
    return chain(trace(decay=0.9), trace(decay=0.5), sgd(lr=0.1))


def measured_between() -> Optimizer:
    return chain(trace(decay=0.9), clip_by_global_norm(1.0), trace(decay=0.5), sgd(lr=0.1))


def by_update(optimizer: Optimizer, param: Tensor, steps: range) -> Tensor:
    params, state = param, optimizer.init(param)
    for step in steps:
        params, state = optimizer.update(params, noise(step, *param.shape), state)
    return params


def made(optimizer: Optimizer) -> tuple[torch.nn.Parameter, TorchOptimizer]:
    param = torch.nn.Parameter(noise(100, 5))
    return param, TorchOptimizer([param], optimizer)


def step(param: Tensor, optimizer: Any, steps: range) -> None:
    for number in steps:
        param.grad = noise(number, *param.shape)
        optimizer.step()


def test_the_names_of_chains() -> None:
    """A field has the name of its stage if fields clash, and a number if the stage occurs twice."""
    names = [name for own in state_names(twice().stages) for name in own]
    assert names == ["trace.buf", "trace_2.buf", "momentum_buffer"]
    once = chain(trace(decay=0.9), sgd(lr=0.1))
    assert [own for own in state_names(once.stages) if own] == [("buf",), ("momentum_buffer",)]
    apart = chain(trace(decay=0.9), other(decay=0.5), sgd(lr=0.1))
    assert [own for own in state_names(apart.stages) if own][:2] == [("trace.buf",), ("other.buf",)]


@each(chain_of=[twice, measured_between], storage=["float32", "bfloat16"])
def test_a_stage_that_stands_twice_keeps_two_states(chain_of: Any, storage: str) -> None:
    """Steps equal the pure update, and continue from a checkpoint, in each storage."""
    optimizer = stored(chain_of(), state=storage)
    param, one = made(optimizer)
    step(param, one, range(3))
    if storage == "float32":
        assert set(one.state[param]) == {"step", "trace.buf", "trace_2.buf"}
    again, two = made(optimizer)
    with torch.no_grad():
        again.copy_(param)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for param_, stepped in ((param, one), (again, two)):
        step(param_, stepped, range(3, 6))
    assert same_bits(again, param)
    assert same_bits(param, by_update(optimizer, noise(100, 5), range(6)))


def test_a_stored_chain_takes_the_plain_state() -> None:
    """Each stored field loads the plain field of the same name."""
    param, plain = made(measured_between())
    step(param, plain, range(2))
    optimizer = stored(measured_between(), state={"trace.buf": "bfloat16"})
    again, narrow = made(optimizer)
    narrow.load_state_dict(plain.state_dict())
    held, want = narrow.state[again], plain.state[param]
    assert same_bits(held["trace_buf"], want["trace.buf"].to(torch.bfloat16))
    assert same_bits(held["trace_2_buf"], want["trace_2.buf"])


def test_a_field_with_a_dtype_of_its_own_under_a_longer_name() -> None:
    """The field is loaded as saved, and not rounded to the parameter's dtype."""
    optimizer = chain(double(decay=0.9), double(decay=0.7), sgd(lr=0.1))
    param, one = made(optimizer)
    step(param, one, range(3))
    again, two = made(optimizer)
    two.load_state_dict(one.state_dict())
    for name in ("double.buf", "double_2.buf"):
        assert same_bits(two.state[again][name], one.state[param][name])


def test_described_under_its_names() -> None:
    """The table has a row for each field."""
    rows = [row.name for row in describe(twice(), noise(0, 8)).rows]
    assert {"trace.buf", "trace_2.buf"} <= set(rows)


def test_entries_and_back() -> None:
    """The conversion to entries and back loses nothing."""
    optimizer, param = twice(), noise(0, 3)
    params, state = optimizer.update(param, noise(1, 3), optimizer.init(param))
    hypers = optimizer.hypers_at(())
    entries = to_entries(optimizer.stages, hypers, params, state.leaves)
    again = from_entries(optimizer.stages, hypers, params, entries, "w")
    pairs = zip(again.stages, state.leaves.stages, strict=True)
    assert all(same_bits(a.buf, b.buf) for a, b in pairs if isinstance(b, TraceState))


def sharded() -> tuple[torch.nn.Parameter, Any]:
    param = torch.nn.Parameter(noise(100, 5))
    return param, ZeroRedundancyOptimizer([("w", param)], twice())


@pytest.mark.usefixtures("world_of_one")
def test_zero_writes_both(tmp_path: Path) -> None:
    """ZeRO writes both states into its state dict and its checkpoint, and reads both again."""
    param, zero = sharded()
    step(param, zero, range(3))
    zero.consolidate_state_dict()
    entries = zero.state_dict()["state"][0]
    assert set(entries) == {"step", "trace.buf", "trace_2.buf"}
    loaded, saved = sharded(), sharded()
    loaded[1].load_state_dict(zero.state_dict())
    checkpoints.save(zero, tmp_path)
    checkpoints.load(saved[1], tmp_path)
    with torch.no_grad():
        for again in (loaded[0], saved[0]):
            again.copy_(param)
    step(param, zero, range(3, 6))
    for again, other_zero in (loaded, saved):
        step(again, other_zero, range(3, 6))
        assert same_bits(again, param)


class StepState(NamedTuple):
    step: Tensor


def step_init(param: Tensor, hyper: Any) -> StepState:
    return StepState(torch.zeros_like(param))


def rule(param: Tensor, grad: Tensor, state: Any, c: Any) -> tuple[Tensor, Any]:
    return param - grad, state


@each(name=["step", "params", "param_names", "initial_lr", "decoupled_weight_decay"])
def test_reserved_hyper_parameters_are_refused(name: str) -> None:
    """The error occurs when the stage is made, and names the hyper-parameter."""
    hyper = NamedTuple("Hyper", [(name, float)])  # type: ignore[misc]  # the name is drawn
    with pytest.raises(ValueError, match=f"odd: a hyper-parameter cannot be called '{name}'"):
        Rule(name="odd", hyper=hyper, rule=rule)


def test_a_field_of_state_called_step_is_refused() -> None:
    """The error occurs when the stage is made, because torch keeps the step count as 'step'."""
    with pytest.raises(
        ValueError, match=r"odd: a field of state cannot be called 'step'.*odd_step"
    ):
        Rule(name="odd", hyper=TraceHyper, state=StepState, init=step_init, rule=rule)
