"""Cost models and reports: their byte counts are those of the tensors that ``init`` makes."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_optim
from functional_optim import (
    Optimizer,
    Rule,
    adam,
    adamw,
    algorithms,
    chain,
    clip_by_global_norm,
    if_any,
    sgd,
)
from sharding import ByteCost, ElementCost, ParameterSpec, Weight, Weights, plan
from tests.choices import case, examples

from .support import any_plan, of_sizes, specs


def state_bytes(optimizer: Optimizer, path: str, tensor: Tensor) -> int:
    """Return the number of bytes in the state that the optimizer makes for a tensor."""
    leaf = optimizer.init({path: tensor}).leaves[path]
    tensors = [leaf.step]
    for state in leaf.stages:
        for value in state:
            tensors += value if isinstance(value, list) else [value]
    return sum(one.untyped_storage().nbytes() for one in tensors)


ALL = {name: getattr(functional_optim, name)() for name in algorithms.__all__}
EVERY = {
    name: one
    for name, one in ALL.items()
    # Keep only optimizers that take complex parameters.
    if all(s.kind == "pointwise" and not s.dtypes for s in one.stages)
} | {
    "amsgrad": adam(amsgrad=True),
    "momentum": sgd(0.1, momentum=0.9),
    "clipped": chain(clip_by_global_norm(1.0), adamw()),
    "tensor lr": adamw(lr=torch.tensor(0.1)),
    "schedule": functional_optim.rprop(lr=lambda step: 0.1),
    "overridden": adam().override(if_any(("p1",)), amsgrad=True),
}


@examples(10)
@given(st.data())
def test_bytes_are_those_of_the_tensors(data: st.DataObject) -> None:
    parameters = data.draw(specs(most=5))
    made = data.draw(any_plan(parameters))
    for name, optimizer in EVERY.items():
        report = made.report(optimizer)
        for rank in range(made.shard_ranks):
            counted = {"parameter_bytes": 0, "gradient_bytes": 0, "state_bytes": 0}
            for one in made.owned(rank):
                spec = parameters[one.parameter]
                piece = torch.zeros(one.stop - one.start, dtype=spec.dtype)
                counted["parameter_bytes"] += piece.nbytes
                if spec.requires_grad:
                    counted["gradient_bytes"] += piece.nbytes
                    counted["state_bytes"] += state_bytes(optimizer, spec.path, piece)
            counted["total_bytes"] = sum(counted.values())
            with case(optimizer=name, rank=rank):
                assert {column: getattr(report, column)[rank] for column in counted} == counted


class _Hyper(NamedTuple):
    lr: float


class _Blocks(NamedTuple):
    scales: Tensor  # one scale for each block of 4 elements
    codes: Tensor  # uint8, the shape of the parameter


class _Factors(NamedTuple):
    rows: Tensor
    columns: Tensor


def _init_blocks(param: Tensor, hyper: _Hyper) -> _Blocks:
    return _Blocks(
        param.new_zeros(-(-param.numel() // 4)), torch.zeros_like(param, dtype=torch.uint8)
    )


def _init_factors(param: Tensor, hyper: _Hyper) -> _Factors:
    return _Factors(param.new_zeros(param.shape[0]), param.new_zeros(param.shape[1:]))


def _init_half(param: Tensor, hyper: _Hyper) -> _Factors:
    return _Factors(param.new_zeros(param.numel() // 2), param.new_zeros(0))


def _rule(param: Tensor, grad: Tensor, state: Any, c: _Hyper) -> tuple[Tensor, Any]:
    return param, state


def _optimizer(**fields: Any) -> Optimizer:
    return chain(Rule(name="test", hyper=_Hyper, rule=_rule, **fields)(lr=0.1))


@examples(20)
@given(st.lists(st.integers(0, 50), max_size=6), st.integers(1, 6))
def test_state_in_blocks_is_counted_exactly(sizes: list[int], ranks: int) -> None:
    optimizer = _optimizer(state=_Blocks, init=_init_blocks, granularity=4)
    made = plan(of_sizes(*sizes), ranks, "elements", optimizer)
    for rank, number in enumerate(made.report(optimizer).state_bytes):
        assert number == sum(
            state_bytes(optimizer, one.path, torch.zeros(one.stop - one.start))
            for one in made.owned(rank)
        )


def test_state_of_whole_matrices_is_counted_by_shape() -> None:
    optimizer = _optimizer(state=_Factors, init=_init_factors, kind="per_matrix")
    wide = ParameterSpec("wide", (2, 100), kind="per_matrix")
    tall = ParameterSpec("tall", (20, 10), kind="per_matrix")
    weights = ByteCost(optimizer, parameters=False, gradients=False)([wide, tall])
    assert weights.whole([200, 200]) == [8 + 4 * 102, 8 + 4 * 30]


def test_state_that_grows_unevenly_is_refused_with_the_way_out() -> None:
    optimizer = _optimizer(state=_Factors, init=_init_half)
    with pytest.raises(ValueError, match=r"'p0' does not grow evenly .* per_matrix"):
        plan(of_sizes(8), 2, "largest_first", optimizer)


def test_costs_are_chosen_by_what_is_given() -> None:
    """A plan balances elements without an optimizer, and bytes with one.

    So float64 elements cost twice as much once bytes count. An explicit cost overrides both.
    """
    parameters = [ParameterSpec("d", (6,), torch.float64), *of_sizes(6, 6)]
    assert sorted(plan(parameters, 2).report().elements) == [6, 12]
    by_bytes = plan(parameters, 2, optimizer=sgd(0.1))
    assert by_bytes.owners("p0") == by_bytes.owners("p1") != by_bytes.owners("d")
    assert (
        plan(parameters, 2, optimizer=sgd(0.1), cost=ElementCost()).pieces
        == plan(parameters, 2).pieces
    )


def test_frozen_parameters_cost_their_own_bytes_only() -> None:
    (spec,) = of_sizes(10, requires_grad=False)
    assert ByteCost(adamw())([spec]).whole([10]) == [40]
    assert ByteCost(adamw())([replace(spec, requires_grad=True)]).whole([10]) == [168]


def test_what_is_no_optimizer_is_refused() -> None:
    wrong: Any
    for wrong in (3, "adamw"):
        with pytest.raises(TypeError, match=r"optimizer must be a functional_optim\.Optimizer"):
            plan(of_sizes(3), 2, optimizer=wrong)
        with pytest.raises(TypeError, match="cost must be a function"):
            plan(of_sizes(3), 2, cost=wrong)
    with pytest.raises(TypeError, match="optimizer of 'p0' must be an Optimizer, got None"):
        plan(of_sizes(3), 2, optimizer=lambda spec: None)


def test_weights_of_pieces() -> None:
    weight = Weight(2, 3, 5, block=4)
    assert [weight.of(length) for length in (0, 1, 4, 5)] == [5, 10, 16, 21]
    many = Weights.of_each([weight, Weight(1), weight])
    assert len(many.kinds) == 2
    assert many.whole([4, 7, 5]) == [16, 7, 21]
    assert Weights.of_each([weight, weight]).whole([4, 5]) == [16, 21]


def test_traffic_is_that_of_an_all_reduce_where_all_own_the_same() -> None:
    for ranks in (1, 2, 4, 8):
        report = plan(of_sizes(800), ranks, "elements").report()
        assert report.sent_bytes == (2 * (ranks - 1) * 3200 // ranks,) * ranks
        assert report.received_bytes == report.sent_bytes


@examples(20)
@given(st.data())
def test_traffic_is_what_the_steps_of_it_add_up_to(data: st.DataObject) -> None:
    parameters = data.draw(specs())
    made = data.draw(any_plan(parameters))
    report, ranks = made.report(), made.shard_ranks
    sent, received = [0] * ranks, [0] * ranks
    for owner in range(ranks):
        for one in made.owned(owner):
            spec = parameters[one.parameter]
            size = (one.stop - one.start) * spec.dtype.itemsize * spec.requires_grad
            for other in range(ranks):
                if other != owner:
                    sent[other] += size  # the gradient goes to its owner
                    received[owner] += size
                    sent[owner] += size  # the owner sends the new parameter
                    received[other] += size
    assert report.sent_bytes == tuple(sent)
    assert report.received_bytes == tuple(received)


def test_between_replicas_only_what_is_owned_is_reduced() -> None:
    report = plan(of_sizes(800), 8, "hierarchical", node_size=4, within="elements").report()
    assert report.between_bytes == (800,) * 4  # 2 * (2 - 1) / 2 times 200 elements of 4 bytes
    assert plan(of_sizes(800), 4).report().between_bytes == (0,) * 4


def test_imbalance_names_its_columns() -> None:
    report = plan(of_sizes(6, 2), 2).report()
    assert report.imbalance() == report.imbalance("elements") == 1.5
    assert plan([], 3).report().imbalance() == 1.0
    with pytest.raises(ValueError, match="column must be one of parameters, .*, got 'bytes'"):
        report.imbalance("bytes")
