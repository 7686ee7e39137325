"""Blocks: how they divide a parameter, and steps of their owners compared with Muon's options."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from functional_optim import Optimizer, adamw, labels, muon, partition, with_shape
from sharding import MatrixBlocks, ParameterSpec, plan, specs_of
from tests.choices import case, examples
from tests.tensors import normal


@examples(40)
@given(
    st.lists(st.integers(1, 4), max_size=2),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.lists(st.integers(1, 4), min_size=1, max_size=2),
    st.booleans(),
)
def test_blocks_are_contiguous_and_cover_the_parameter(
    batch: list[int], sizes: list[int], columns: list[int], equal: bool
) -> None:
    sizes = sizes[:1] * len(sizes) if equal else sizes
    rows = {"row_blocks": len(sizes)} if equal else {"split_sizes": tuple(sizes)}
    blocks = MatrixBlocks(**rows, batch_axes=len(batch), column_axes=len(columns))
    shape = (*batch, sum(sizes), *columns)
    whole = normal(*shape, seed=1)
    parts = blocks.split(whole)
    assert [tuple(one.shape) for one in parts] == blocks.shapes(shape)
    assert torch.equal(torch.cat([one.reshape(-1) for one in parts]), whole.view(-1))
    assert blocks.bounds(shape)[-1] == whole.numel()
    for part, start in zip(parts, blocks.bounds(shape), strict=False):
        assert part.data_ptr() == whole.view(-1)[start:].data_ptr()
    stacked = whole.view(-1, sum(sizes), *columns)
    expected = [part for one in stacked for part in one.split(sizes)]
    assert all(torch.equal(a, b) for a, b in zip(parts, expected, strict=True))


def test_blocks_that_do_not_fit_are_refused() -> None:
    wrong: Any
    for wrong, shape, message in (
        (MatrixBlocks(row_blocks=5), (12, 4), "row_blocks=5 must divide the 12 rows"),
        (
            MatrixBlocks(split_sizes=(6, 5)),
            (12, 4),
            r"split_sizes=\(6, 5\) must divide the 12 rows",
        ),
        (MatrixBlocks(batch_axes=1), (12, 4), "must have 3 dimensions"),
    ):
        with case(message=message), pytest.raises(ValueError, match=message):
            ParameterSpec("w", shape, kind="per_matrix", blocks=wrong)
    with pytest.raises(ValueError, match="'w' has blocks, and its kind is 'pointwise'"):
        ParameterSpec("w", (4, 4), blocks=MatrixBlocks(row_blocks=2))
    wrong = 3
    with pytest.raises(TypeError, match="blocks of 'w' must be MatrixBlocks or None, got 3"):
        ParameterSpec("w", (4, 4), kind="per_matrix", blocks=wrong)
    for given_, error, message in (
        ({"row_blocks": 0}, ValueError, "row_blocks of MatrixBlocks must be >= 1, got 0"),
        ({"row_blocks": 2.0}, TypeError, "row_blocks of MatrixBlocks must be whole numbers"),
        ({"batch_axes": -1}, ValueError, "batch_axes of MatrixBlocks must be >= 0, got -1"),
        ({"split_sizes": (1, 0)}, ValueError, "split_sizes of MatrixBlocks must be >= 1, got 0"),
        ({"row_blocks": 2, "split_sizes": (1, 1)}, ValueError, "row_blocks must be 1 if"),
    ):
        with case(message=message), pytest.raises(error, match=message):
            MatrixBlocks(**given_)


def stepped_by_owners(
    specs: list[ParameterSpec], ranks: int, rule: Optimizer, start: Any, grads: list[Any]
) -> dict[str, torch.Tensor]:
    """Return the parameters after each rank has stepped its views as separate parameters."""
    params = {path: one.clone() for path, one in start.items()}
    made = plan(specs, ranks, "two_resource")
    for rank in range(ranks):
        own = made.views(rank, params)
        if not own:  # there are more ranks than blocks
            continue
        state = rule.init(own)
        for given_ in grads:
            rule.update_(own, made.views(rank, given_), state)
    return params


@examples(20)
@given(st.data())
def test_blocks_that_owners_step_are_those_of_muon_bit_for_bit(data: st.DataObject) -> None:
    """Owners that step their blocks match Muon with the same blocks in every bit.

    Blocks are heads, Q, K and V of different sizes, and experts, with plain matrices in between.
    """
    columns, ranks = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 7))
    size, count = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    sizes = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    kinds: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
        "heads": ((size * count, columns), {"row_blocks": count}),
        "qkv": ((sum(sizes), columns), {"split_sizes": sizes}),
        "experts": ((count, size, columns), {"batch_axes": 1}),
        "plain": ((size, columns), {}),
    }
    shapes = {path: shape for path, (shape, _) in kinds.items()}
    specs = [
        ParameterSpec(path, shape, kind="per_matrix", blocks=MatrixBlocks(**options))
        for path, (shape, options) in kinds.items()
    ]
    draws = [
        {path: normal(*shape, seed=10 * step + k) for k, (path, shape) in enumerate(shapes.items())}
        for step in range(3)
    ]
    start, grads = draws[0], draws[1:]
    made = stepped_by_owners(specs, ranks, muon(0.1), start, grads)
    for path, (_, options) in kinds.items():
        rule, param = muon(0.1, **options), start[path].clone()
        state = rule.init(param)
        for given_ in grads:
            rule.update_(param, given_[path], state)
        with case(path=path):
            assert torch.equal(made[path], param)


def test_views_of_wrong_tensors_are_refused() -> None:
    specs = [ParameterSpec("w", (4, 4), kind="per_matrix", blocks=MatrixBlocks(row_blocks=2))]
    made = plan(specs, 1)
    for tensors, message in (
        ({}, "there is no tensor of 'w'"),
        ({"w": torch.zeros(4, 3)}, r"'w' has shape \(4, 3\), and \(4, 4\) in the plan"),
        ({"w": torch.zeros(4, 4).t()}, "'w' is cut, and its elements do not have the order"),
    ):
        with pytest.raises(ValueError, match=message):
            made.views(0, tensors)
    cut = plan([ParameterSpec("v", (6,))], 2, "elements")
    assert list(cut.views(1, {"v": torch.ones(6)})) == ["v[3:6]"]


def test_specs_have_the_kinds_and_blocks_that_rules_declare() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"qkv": nn.Linear(4, 12), "out": nn.Linear(4, 4)})
    split = partition(
        {"matrices": muon(row_blocks=2), "rest": adamw()},
        labels({"matrices": with_shape(ndim=2)}, default="rest"),
    )
    found = {spec.path: spec for spec in specs_of(model, optimizer=split)}
    assert found["qkv.weight"].blocks == MatrixBlocks(row_blocks=2)
    assert found["qkv.weight"].kind == "per_matrix"
    assert found["qkv.bias"].kind == "pointwise" and found["qkv.bias"].blocks is None
    kinds = {spec.path: spec.kind for spec in plan(model, 2, "two_resource", split).specs}
    assert kinds == {path: spec.kind for path, spec in found.items()}
