"""Tables of stored tensors, in bytes."""

from typing import Any

import optree
import pytest
import torch

from functional_optim import adamw, chain, clip_by_global_norm, sgd
from functional_optim.storage import CHOICES, compare_storages, describe, stored

from ..choices import case
from .support import BASES, made
from .support import CHOICES as STORED

META = {
    "w": torch.empty(1000, 256, device="meta"),
    "b": torch.empty(300, device="meta"),
    "none": None,
}
COUNT = 256_300


def rows(description: Any) -> dict[str, Any]:
    return {row.name: row for row in description.rows}


def test_bytes_are_those_of_the_tensors() -> None:
    for name in STORED:
        with case(name=name):
            optimizer, dtype = made(name)
            params = {"w": torch.zeros(300, dtype=dtype), "b": torch.zeros(5, 7, dtype=dtype)}
            state = optimizer.init(params)
            kept = optree.tree_leaves((params, params, state))
            found = describe(optimizer, params)
            assert found.total_bytes == sum(t.numel() * t.element_size() for t in kept)
            assert found.bytes_per_parameter == found.total_bytes / found.numel


def test_the_table() -> None:
    optimizer = stored(adamw(), param="bfloat16+kahan", state={"exp_avg": "int8"})
    param = torch.empty(1024, dtype=torch.bfloat16, device="meta")
    assert str(describe(optimizer, param)).splitlines() == [
        "1,024 parameters  dtype     bytes each   bytes",
        "parameter         bfloat16       2.000   2,048",
        "gradient          bfloat16       2.000   2,048",
        "step              int64          0.008       8",
        "compensation      bfloat16       2.000   2,048",
        "exp_avg           uint8          1.000   1,024",
        "exp_avg_scale     float32        0.016      16",
        "exp_avg_sq        float32        4.000   4,096",
        "total                           11.023  11,288",
    ]


def test_two_dtypes_and_two_stages() -> None:
    params = [torch.zeros(3), torch.zeros(3, dtype=torch.float64)]
    assert rows(describe(sgd(momentum=0.9), params))["momentum_buffer"].dtype == "float32, float64"
    twice = chain(BASES["momentum"]().links[-1], sgd(momentum=0.9))
    assert {"sgd.momentum_buffer"} < set(rows(describe(twice, params)))


def test_nothing_and_nonsense() -> None:
    assert describe(sgd(), torch.zeros(0)).bytes_per_parameter == 0.0
    with pytest.raises(ValueError, match="no tensor"):
        describe(sgd(), {"a": None})
    with pytest.raises(ValueError, match="matches no parameter"):
        describe(sgd().override(("b",), momentum=0.9), {"a": torch.ones(3)})
    with pytest.raises(TypeError, match="must be a tensor"):
        describe(sgd(), [1.0])
    with pytest.raises(ValueError, match="takes parameters of torch.bfloat16"):
        describe(stored(sgd(), param="bfloat16"), torch.zeros(3))


def test_comparison() -> None:
    optimizer = chain(clip_by_global_norm(1.0), adamw())
    found = {
        name: round(one.bytes_per_parameter, 3)
        for name, one in compare_storages(optimizer, META["w"]).descriptions
    }
    assert found == {
        "float32": 16.0,
        "float32, state bfloat16+stochastic": 12.0,
        "float32, state int8+stochastic": 10.031,
        "bfloat16+master": 16.0,
        "bfloat16+kahan": 14.0,
        "bfloat16+stochastic": 12.0,
        "bfloat16+kahan, state int8+stochastic": 8.031,
        "bfloat16+stochastic, state int8+stochastic": 6.031,
    }
    assert list(found) == list(CHOICES)


def test_a_comparison_takes_its_own_choices() -> None:
    table = compare_storages(sgd(), META, {"one": {}, "two": {"param": "bfloat16"}})
    heads, one, two = str(table).splitlines()
    assert heads.split()[-4:] == ["state", "total", "all", "bytes"]
    assert one.split() == ["one", "4.000", "4.000", "0.000", "8.000", "2,050,416"]
    assert two.split() == ["two", "2.000", "2.000", "0.000", "4.000", "1,025,216"]
    with pytest.raises(ValueError, match="stored already"):
        compare_storages(stored(sgd(), param="bfloat16"), META)
