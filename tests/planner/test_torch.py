"""The policies that torch has too give exactly what torch's own class gives."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from sharding import ParameterSpec, ddp_buckets, plan
from tests.choices import case, examples

with warnings.catch_warnings():  # importing that package of torch scripts functions
    warnings.filterwarnings("ignore", r"`torch.jit\.\w+` is deprecated", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.optim.zero_redundancy_optimizer import _OverlapInfo, _OverlapStatus

from .support import MODELS, TORCH, of_sizes

Group = list[Tensor]


def torch_zero(groups: list[Group], ranks: int) -> ZeroRedundancyOptimizer:
    """torch's class with what its partition needs, and no process group."""
    zero = object.__new__(ZeroRedundancyOptimizer)
    zero.param_groups = [{"params": group} for group in groups]
    zero.world_size = ranks
    zero._partition_parameters_cache = []
    return zero


def torch_partition(groups: list[Group], ranks: int) -> list[list[list[int]]]:
    """For each rank and group, the ids of its parameters."""
    parts = torch_zero(groups, ranks)._partition_parameters()
    return [[sorted(map(id, group["params"])) for group in part] for part in parts]


def meta(sizes: list[int]) -> Group:
    """Every third one is frozen: in torch's partition it counts as the others do."""
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


def torch_buckets(buckets: list[Group], ranks: int, *, shard: bool) -> list[set[int]]:
    """For each rank, the ids of the parameters that torch's overlapped ZeRO gives it."""
    zero: Any = torch_zero([], ranks)
    zero._overlap_with_ddp = True
    zero._bucket_assignments_per_rank_cache = []
    zero.global_rank = 0
    info = zero._overlap_info = _OverlapInfo(ranks)
    info.status = _OverlapStatus.INITIALIZED
    info.shard_buckets = shard
    info.params_per_bucket = buckets
    info.total_size = sum(param.numel() for bucket in buckets for param in bucket)
    assert zero._bucket_assignments_per_rank  # fills params_per_rank
    return [set(map(id, params)) for params in info.params_per_rank]


@examples(30)
@given(
    st.booleans(),
    st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=6),
    st.integers(1, 8),
)
def test_buckets_go_where_torch_sends_them(shard: bool, sizes: list[list[int]], ranks: int) -> None:
    buckets = [meta(bucket) for bucket in sizes]
    params = [param for bucket in buckets for param in bucket]
    specs = of_sizes(*(param.numel() for param in params))
    names = iter(spec.path for spec in specs)
    paths = [[next(names) for _ in bucket] for bucket in buckets]
    try:
        theirs = torch_buckets(buckets, ranks, shard=shard)
    except AssertionError as error:  # torch has no rank left for a bucket of many runs
        assert "All indices are disallowed" in str(error)  # noqa: PT017  another message is another error
        assume(False)
    found = plan(specs, ranks, "split_buckets" if shard else "by_bucket", buckets=paths)
    ours = [{id(params[one.parameter]) for one in found.owned(rank)} for rank in range(ranks)]
    assert ours == theirs


@examples(20)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 40), st.sampled_from([torch.float32, torch.float64]), st.booleans()
        ),
        max_size=15,
    ),
    st.integers(1, 300),
    st.integers(1, 300),
)
def test_default_buckets_are_those_that_ddp_makes(
    params: list[tuple[int, torch.dtype, bool]], size: int, first: int
) -> None:
    specs = [
        ParameterSpec(f"p{i}", (numel,), dtype, requires_grad=trained)
        for i, (numel, dtype, trained) in enumerate(params)
    ]
    trained = [spec for spec in specs if spec.requires_grad][::-1]
    assume(trained)
    tensors = [torch.empty(spec.shape, dtype=spec.dtype) for spec in trained]
    indices, _ = torch.distributed._compute_bucket_assignment_by_size(
        tensors, [first, size], [False] * len(tensors)
    )
    theirs = [[trained[index].path for index in bucket] for bucket in indices]
    ours = ddp_buckets(specs, bucket_bytes=size, first_bucket_bytes=first)
    assert ours == theirs


def test_unknown_doubled_and_empty_buckets_are_refused() -> None:
    specs = of_sizes(1, 2)
    with pytest.raises(ValueError, match="bucket 0 names 'x', which is no parameter here"):
        plan(specs, 2, "by_bucket", buckets=[["x"]])
    with pytest.raises(ValueError, match="'p1' stands in buckets 0 and 1"):
        plan(specs, 2, "split_buckets", buckets=[["p0", "p1"], ["p1"]])
    with pytest.raises(ValueError, match=r"bucket 1 must be a list of paths, got \[\]"):
        plan(specs, 2, "by_bucket", buckets=[["p0"], []])


def test_parameters_in_no_bucket_go_to_the_least_loaded_rank() -> None:
    specs = of_sizes(10, 4, 3, 2)
    found = plan(specs, 2, "by_bucket", buckets=[["p0"]])
    assert [one.path for one in found.owned(1)] == ["p1", "p2", "p3"]
