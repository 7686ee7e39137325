"""Policies that torch has, too, give exactly the plan of torch's own class."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sharding import ParameterSpec, plan
from tests.choices import case, examples

with warnings.catch_warnings():  # the import runs torch.jit.script
    warnings.filterwarnings("ignore", r"`torch.jit\.\w+` is deprecated", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

from .support import MODELS, TORCH

Group = list[Tensor]


def torch_zero(groups: list[Group], ranks: int) -> ZeroRedundancyOptimizer:
    """Return torch's class with the attributes that its partition reads, and no process group."""
    zero = object.__new__(ZeroRedundancyOptimizer)
    zero.param_groups = [{"params": group} for group in groups]
    zero.world_size = ranks
    zero._partition_parameters_cache = []
    return zero


def torch_partition(groups: list[Group], ranks: int) -> list[list[list[int]]]:
    """Return the ids of the parameters for each rank and group, by torch's partition."""
    parts = torch_zero(groups, ranks)._partition_parameters()
    return [[sorted(map(id, group["params"])) for group in part] for part in parts]


def meta(sizes: list[int]) -> Group:
    """Return parameters of these sizes. Every third is frozen, but counts like the others."""
    return [
        torch.empty(size, device="meta", requires_grad=place % 3 != 1)
        for place, size in enumerate(sizes)
    ]


def specs_of_groups(groups: list[Group]) -> list[ParameterSpec]:
    return [
        ParameterSpec(
            f"{number}.{place}",
            tuple(param.shape),
            requires_grad=param.requires_grad,
            group=number,
        )
        for number, group in enumerate(groups)
        for place, param in enumerate(group)
    ]


@examples(20)
@given(
    st.lists(st.lists(st.integers(0, 30), max_size=14), min_size=1, max_size=4),
    st.integers(1, 12),
)
def test_greedy_is_torchs_partition(sizes: list[list[int]], ranks: int) -> None:
    groups = [meta(group) for group in sizes]
    specs = specs_of_groups(groups)
    params = [param for group in groups for param in group]
    found = plan(specs, ranks, "greedy")
    ours: list[list[list[int]]] = [[[] for _ in groups] for _ in range(ranks)]
    for rank in range(ranks):
        for one in found.owned(rank):
            assert one.whole
            ours[rank][specs[one.parameter].group].append(id(params[one.parameter]))
    mine = [[sorted(group) for group in rank] for rank in ours]
    assert mine == torch_partition(groups, ranks)


@examples(20)
@given(
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=9), min_size=2, max_size=4),
    st.integers(1, 6),
)
def test_groups_added_later_go_where_torch_puts_them(sizes: list[list[int]], ranks: int) -> None:
    specs = specs_of_groups([meta(group) for group in sizes])
    grown = plan([spec for spec in specs if spec.group == 0], ranks, "greedy")
    for number in range(1, len(sizes)):
        grown = grown.extended([spec for spec in specs if spec.group == number])
    assert grown == plan(specs, ranks, "greedy")


def test_greedy_has_torchs_imbalance_on_real_shapes() -> None:
    for (name, ranks), expected in TORCH.items():
        with case(name=name, ranks=ranks):
            found = plan(MODELS[name], ranks, "greedy").report().imbalance("elements")
            assert found == pytest.approx(expected, rel=0.01)
