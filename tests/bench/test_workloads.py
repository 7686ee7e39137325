"""Tests of the shapes and sizes of workloads."""

from benchmarks.workloads import (
    GPT2,
    MANY,
    ONE,
    RESNET50,
    SIZES,
    SMALL_1,
    SMALL_10,
    SMALL_100,
    WORKLOADS,
)
from tests.choices import case


def test_full_size_is_what_its_name_says() -> None:
    found = {
        name: (len(one.shapes["full"]()), one.numel("full")) for name, one in WORKLOADS.items()
    }
    assert found == {
        GPT2: (148, 124_439_808),  # the published count, with the output tied to the embedding
        RESNET50: (161, 25_557_032),  # as in torchvision's resnet50
        MANY: (10_000, 10_000_000),
        ONE: (1, 50_000_000),
        SMALL_1: (1, 100),
        SMALL_10: (10, 1000),
        SMALL_100: (100, 10_000),
    }


def test_smaller_sizes_are_smaller() -> None:
    for name, one in WORKLOADS.items():
        with case(name=name):
            counts = [one.numel(size) for size in SIZES]
            assert counts == sorted(counts, reverse=True)
            assert all(min(shape) > 0 for size in SIZES for shape in one.shapes[size]())
