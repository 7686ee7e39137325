"""What is stepped has the shapes it claims."""

import pytest

from benchmarks.workloads import GPT2, MANY, ONE, RESNET50, SIZES, SMALL_1, SMALL_10, WORKLOADS


@pytest.mark.parametrize(
    ("name", "tensors", "numel"),
    [
        (GPT2, 148, 124_439_808),  # the published count, output tied to the embedding
        (RESNET50, 161, 25_557_032),  # as torchvision's resnet50
        (MANY, 10_000, 10_000_000),
        (ONE, 1, 50_000_000),
        (SMALL_1, 1, 100),
        (SMALL_10, 10, 1000),
    ],
)
def test_full_size_is_what_its_name_says(name: str, tensors: int, numel: int) -> None:
    assert len(WORKLOADS[name].shapes["full"]()) == tensors
    assert WORKLOADS[name].numel("full") == numel


@pytest.mark.parametrize("name", WORKLOADS)
def test_smaller_sizes_are_smaller(name: str) -> None:
    counts = [WORKLOADS[name].numel(size) for size in SIZES]
    assert counts == sorted(counts, reverse=True)
    assert all(min(shape) > 0 for size in SIZES for shape in WORKLOADS[name].shapes[size]())
