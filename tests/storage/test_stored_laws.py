"""Every storage obeys the laws of optimizers, over rules with every kind of state."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from functional_optim import Optimizer
from functional_optim.executors.leaf import is_measured
from functional_optim.stage import grain_of
from functional_optim.storage import stored
from functional_optim.testing import check_optimizer

from .support import BASES, CHOICES, assert_same, dtype_of, normal

LAWS = ("pure", "in place", "any split by leaves", "one step each", "any moment", "contained")


def made(name: str) -> Optimizer:
    base, arguments = CHOICES[name]
    return stored(BASES[base](), **arguments)


@pytest.mark.parametrize("name", CHOICES)
def test_laws(name: str) -> None:
    check_optimizer(
        lambda: made(name), dtypes=[dtype_of(CHOICES[name][1])], laws=LAWS, max_examples=12
    )


def in_pieces(optimizer: Optimizer, state: Any, cuts: list[int], grain: int) -> list[Any]:
    """The state of a 1-D leaf, cut as an executor cuts it."""
    pieces = []
    for start, end in itertools.pairwise(cuts):
        blocks = slice(start // grain, -(-end // grain))

        def cut(tensor: Tensor, a: int = start, b: int = end, c: slice = blocks) -> Tensor:
            return tensor[a:b].clone() if tensor.numel() == cuts[-1] else tensor[c].clone()

        stages = tuple(
            type(one)(*([cut(t) for t in v] if isinstance(v, list) else cut(v) for v in one))
            if one
            else ()
            for one in state.leaves.stages
        )
        leaf = state.leaves._replace(step=state.leaves.step.clone(), stages=stages)
        pieces.append(state._replace(leaves=leaf))
    return pieces


@pytest.mark.parametrize("name", CHOICES)
@settings(max_examples=12, derandomize=True)
@given(length=st.integers(513, 900), marks=st.sets(st.integers(1, 3), min_size=1))
def test_any_split_at_multiples_of_the_granularity(name: str, length: int, marks: set[int]) -> None:
    optimizer = made(name)
    grain = grain_of(optimizer.stages)
    dtype = dtype_of(CHOICES[name][1])
    cuts = sorted({0, length, *(256 * mark for mark in marks if 256 * mark < length)})
    param = normal(length, seed=1).to(dtype)
    state = optimizer.init(param)
    parts = [param[a:b].clone() for a, b in itertools.pairwise(cuts)]
    states = in_pieces(optimizer, state, cuts, grain)
    for step in range(3):
        grad = normal(length, seed=step).to(dtype)
        totals: list[Tensor] = []
        for stage in optimizer.stages:
            if is_measured(stage):
                totals.append(optimizer.measure(param, grad, state, measured=totals))
        for i, (a, b) in enumerate(itertools.pairwise(cuts)):
            parts[i], states[i] = optimizer.update(
                parts[i], grad[a:b].clone(), states[i], measured=totals
            )
        param, state = optimizer.update(param, grad, state, measured=totals)
    assert_same(torch.cat(parts), param)
    assert_same(
        [one.leaves.stages for one in states],
        [one.leaves.stages for one in in_pieces(optimizer, state, cuts, grain)],
    )


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("layout", ["transposed", "sliced", "scalar", "empty"])
def test_the_layout_of_a_parameter_is_no_matter(name: str, layout: str) -> None:
    optimizer, dtype = made(name), dtype_of(CHOICES[name][1])
    base = normal(40, 30, seed=2, dtype=dtype)
    param = {
        "transposed": base.T,
        "sliced": base[:, ::2],
        "scalar": base[0, 0],
        "empty": base[:0],
    }[layout]
    grad = normal(*param.shape, seed=3, dtype=dtype)
    got, state = optimizer.update(param, grad, optimizer.init(param))
    want, wanted = optimizer.update(param.contiguous(), grad, optimizer.init(param.contiguous()))
    assert got.stride() == param.stride()
    assert_same((got, state), (want, wanted))


def test_a_graph_of_the_rule_is_the_rule() -> None:
    """What executors do: trace the rule on stand-ins, run the graph on tensors of any length."""
    optimizer = made("smallest")
    stage, hyper = optimizer.stages[-1], optimizer.hypers_at(())[-1]
    param, grad = normal(700, dtype=torch.bfloat16), normal(700, seed=1, dtype=torch.bfloat16)
    state = stage.init(param, hyper)
    first = stage.coefficients(1.0, hyper)
    lists = [len(value) if isinstance(value, list) else None for value in state]

    class Module(torch.nn.Module):
        def forward(self, param: Any, grad: Any, values: Any, numbers: Any) -> Any:
            left, numbered = iter(values), iter(numbers)
            fields = [next(left) if n is None else [next(left) for _ in range(n)] for n in lists]
            c = type(first)(*(next(numbered) if type(v) is float else v for v in first))
            param, made = stage.rule(param, grad, stage.state(*fields), c)
            return param, [t for v in made for t in (v if isinstance(v, list) else [v])]

    count = sum(1 if n is None else n for n in lists)
    numbers = [v for v in first if type(v) is float]
    placeholders = (torch.fx.PH,) * count, (torch.fx.PH,) * len(numbers)
    graph = torch.fx.symbolic_trace(
        Module(), concrete_args={"values": placeholders[0], "numbers": placeholders[1]}
    )
    for step, length in ((1.0, 700), (2.0, 700), (3.0, 700)):
        c = stage.coefficients(step, hyper)
        want, wanted = stage.rule(param, grad, state, c)
        tensors = [t for v in state for t in (v if isinstance(v, list) else [v])]
        got, after = graph(param, grad, tuple(tensors), tuple(v for v in c if type(v) is float))
        assert got.numel() == length
        assert_same(got, want)
        assert_same(after, [t for v in wanted for t in (v if isinstance(v, list) else [v])])
        param, state = want, wanted
