"""Search for two parameters with some, but not all, elements in common."""

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from functional_optim.core.overlap import check_no_overlap
from tests.choices import case, examples

LENGTH = 60
Layout = tuple[list[tuple[int, int]], int]


def is_refused(params: list[Any]) -> bool:
    names = [f"p{k}" for k in range(len(params))]
    try:
        check_no_overlap(params, lambda: names)
    except ValueError:
        return True
    return False


def view_of(memory: Tensor, layout: Layout) -> Tensor:
    dims, offset = layout
    while 1 + sum((size - 1) * stride for size, stride in dims) > LENGTH:
        dims = dims[1:]
    strides, sizes = [stride for _, stride in dims], [size for size, _ in dims]
    extent = 1 + sum((size - 1) * stride for size, stride in dims)
    return memory.as_strided(sizes, strides, offset % (LENGTH - extent + 1))


any_layout = st.tuples(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 20]))),
    st.integers(0, LENGTH - 1),
)
steps = st.sampled_from([1, 1, 2])
blocks = st.tuples(*[st.tuples(st.integers(0, n - 1), st.integers(1, n), steps) for n in (3, 5, 4)])


def compare(indices: list[Tensor], params: list[Tensor]) -> None:
    """Check the result against sets of element numbers."""
    elements = [frozenset(one.reshape(-1).tolist()) for one in indices]
    want = any(a & b and a != b for a, b in combinations(elements, 2))
    assert is_refused(params) == want


@examples(100)
@given(st.lists(any_layout, min_size=2, max_size=4), st.sampled_from([torch.float64, torch.half]))
def test_views_with_any_strides_are_compared_exactly(
    layouts: list[Layout], dtype: torch.dtype
) -> None:
    numbers, memory = torch.arange(LENGTH), torch.zeros(LENGTH, dtype=dtype)
    compare(*([view_of(one, layout) for layout in layouts] for one in (numbers, memory)))


@examples(100)
@given(st.lists(blocks, min_size=2, max_size=4))
def test_blocks_of_one_tensor_are_compared_exactly(chosen: list[Any]) -> None:
    """Blocks have the same outer strides, so the search is modulo these strides."""
    numbers, memory = torch.arange(LENGTH).view(3, 5, 4), torch.zeros(3, 5, 4)
    cuts = [tuple(slice(a, a + size, step) for a, size, step in one) for one in chosen]
    compare(*([one[cut] for cut in cuts] for one in (numbers, memory)))


def test_elements_of_different_sizes_are_compared_by_bytes() -> None:
    memory = torch.zeros(8)
    halves, whole = memory.view(torch.half), torch.view_as_complex(memory.view(4, 2))
    for name, params, want in [
        ("halves beside floats", [memory[:4], halves[8:]], False),
        ("halves in a float", [memory[:4], halves[7:]], True),
        ("real and imaginary parts", [whole.real, whole.imag], False),
        ("a complex tensor and its imaginary part", [whole, whole.imag], True),
        ("a complex tensor and its real view", [whole, memory], False),
        ("halves between the halves", [memory.view(torch.half)[::2], halves[1::2]], False),
        ("floats around halves", [memory[::2], halves[2::4]], False),
        ("floats on halves", [memory[::2], halves[1::4]], True),
    ]:
        with case(name=name):
            assert is_refused(params) == want


def test_the_error_has_the_first_pair_names_and_shapes() -> None:
    memory = torch.zeros(9)
    params = [torch.zeros(3), memory[6:], None, memory[:7].view(7, 1)]
    told = r"^the parameters 'b' of shape \(3,\) and 'd' of shape \(7, 1\) share .* clone\(\) one"
    with pytest.raises(ValueError, match=told):
        check_no_overlap(params, lambda: list("abcd"))


def test_tensors_without_memory_of_their_own_are_not_checked() -> None:
    memory = torch.zeros(6)
    seen = []

    def inside(param: Tensor) -> Tensor:
        """Check tensors inside a transform, which have no storage."""
        seen.append(is_refused([param[:4], param[2:]]))
        return param.sum()

    torch.func.grad(inside)(torch.ones(6))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(memory)
        seen.append(is_refused([fake[:4], fake[2:]]))
    meta, sparse = torch.zeros(6, device="meta"), torch.eye(3).to_sparse()
    lazy = torch.nn.UninitializedParameter()
    empty = [memory[2:2], memory[:4], memory[3:3], memory[4:]]
    freed = [memory.clone(), memory.clone()]
    for one in freed:
        one.untyped_storage().resize_(0)
    seen.append(is_refused([meta[:4], meta[2:], sparse, sparse, lazy, *freed, *empty]))
    assert not any(seen)
    assert is_refused([meta, sparse, lazy, fake, *freed, memory[:4], memory[2:]])
