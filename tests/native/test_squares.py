"""Norms by the native loops, and their squares, have the bits of torch's norms."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

from functional_optim.native import native_norms, native_squares, squares
from functional_optim.transforms.clip_by_global_norm import BLOCK, squares_of_each, sum_of_squares
from functional_optim.wrappers.apply_if_finite import (
    ApplyIfFiniteCoefficients,
    count_not_finite_each,
)

from ..choices import case, examples
from ..tensors import normal
from .support import loops

pytestmark = pytest.mark.usefixtures("with_loops")


def drawn(count: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return numbers of very different sizes, so that the order of a sum matters."""
    return (normal(count, seed=seed) * normal(count, seed=seed + 1).mul(4).exp()).to(dtype)


def wanted(parts: list[Tensor]) -> list[float]:
    norms: Any = [torch.linalg.vector_norm(one, 2.0, dtype=torch.float64) for one in parts]
    return [float(one.square()) for one in norms]


@given(
    lengths=st.lists(st.integers(0, 300) | st.sampled_from([5_000, BLOCK]), min_size=1, max_size=9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    most=st.sampled_from([1, 7, 64, BLOCK]),
)
@examples(30)
def test_they_are_torchs(lengths: list[int], dtype: torch.dtype, most: int) -> None:
    """Squares of tensors of any lengths have torch's bits, for whole tensors or parts."""
    loops()
    tensors = [drawn(count, 2 * k, dtype) for k, count in enumerate(lengths)]
    found = native_squares(tensors, most)
    assert found == wanted([part for one in tensors for part in one.split(most)])


@given(
    lengths=st.lists(
        st.integers(0, 300) | st.sampled_from([5_000, 70_001]), min_size=1, max_size=9
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@examples(30)
def test_norms_are_torchs(lengths: list[int], dtype: torch.dtype) -> None:
    """Norms of whole tensors have torch's bits. With several threads, torch computes large ones."""
    loops()
    tensors = [drawn(count, 2 * k, dtype) for k, count in enumerate(lengths)]
    norms: Any = [torch.linalg.vector_norm(one, 2.0, dtype=torch.float64) for one in tensors]
    found = native_norms(tensors)
    if torch.get_num_threads() > 1 and max(lengths) >= squares.SHARED:
        assert found is None
    else:
        assert found == list(map(float, norms))


def test_norms_of_large_tensors_are_left_to_torchs_threads() -> None:
    loops()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert native_norms([torch.ones(squares.SHARED)]) is None
        assert native_norms([torch.ones(squares.SHARED - 1)]) is not None
        torch.set_num_threads(1)
        assert native_norms([torch.ones(squares.SHARED)]) is not None
    finally:
        torch.set_num_threads(threads)


def test_infinity_and_nan() -> None:
    loops()
    for value in (float("inf"), float("-inf"), float("nan")):
        tensors = [torch.ones(9), torch.ones(9)]
        tensors[1][4] = value
        found = native_squares(tensors, BLOCK)
        assert found is not None
        torch.testing.assert_close(found, [9.0, value * value], equal_nan=True)


OTHERS: dict[str, Callable[[], Tensor]] = {
    "float64": lambda: torch.ones(3, dtype=torch.float64),
    "float16": lambda: torch.ones(3, dtype=torch.float16),
    "bfloat16 beside float32": lambda: torch.ones(3, dtype=torch.bfloat16),
    "turned": lambda: torch.ones(2, 3).t(),
    "expanded": lambda: torch.ones(1).expand(3),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "negative": lambda: torch._neg_view(torch.ones(3)),
    "meta": lambda: torch.ones(3, device="meta"),
    "zero": lambda: torch._efficientzerotensor(3),  # type: ignore[attr-defined]  # torch's own
    "functional": lambda: torch._to_functional_tensor(torch.ones(3)),
}


def test_torch_is_asked_for_all_others() -> None:
    for name, make in OTHERS.items():
        with case(name=name):
            assert loops().squares([torch.ones(2), make()], BLOCK, 4, 1) is None
    for wrong in ((0, 4), (5, 3)):
        with pytest.raises(ValueError, match="parts have an element or more"):
            loops().squares([torch.ones(2)], *wrong, 1)
    with pytest.raises(TypeError, match="takes a list of tensors and three numbers"):
        loops().squares((torch.ones(2),), BLOCK, 4, 1)  # type: ignore[arg-type]  no list
    assert loops().norms([torch.ones(2), torch.ones(3).double()], 4, 1) is None
    with pytest.raises(ValueError, match="rows have 4 or 8 lanes"):
        loops().norms([torch.ones(2)], 3, 1)
    with pytest.raises(TypeError, match="takes a list of tensors and two numbers"):
        loops().norms((torch.ones(2),), 4, 1)  # type: ignore[arg-type]  no list


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.functionalize])
def test_torch_is_asked_inside_of_a_transform_and_there_alone(
    transform: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a transform, torch computes the squares, and nothing is recorded about the loops."""
    loops()
    monkeypatch.setattr(squares, "_KNOWN", {})
    plain, seen = [torch.ones(3), torch.ones(2)], []

    def inside(x: Tensor) -> Tensor:
        seen.append(native_squares(plain, BLOCK))
        return x

    transform(inside)(torch.ones(2))
    assert seen == [None]
    assert native_squares(plain, BLOCK) == wanted(plain)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # caused by torch
def test_derivatives_are_torchs() -> None:
    """The loops do not see the tangent of a dual gradient, so they are not used."""
    loops()
    grads = [torch.full((3,), 2.0), torch.ones(2)]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(grads[0], torch.ones(3))
        assert native_squares([dual, grads[1]], BLOCK) is None
    assert native_squares(grads, BLOCK) == wanted(grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sums_are_those_of_each_gradient_alone(dtype: torch.dtype) -> None:
    """The sums of a list equal those of each gradient alone, in one thread or two.

    Large gradients are added up in parts.
    """
    loops()
    sizes = (1, 40, BLOCK, BLOCK + 1, 5 * BLOCK + 3, 70_000, 3_000_000)
    grads = [drawn(size, size, dtype) for size in sizes]
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found += [squares_of_each(grads), torch.stack([*map(sum_of_squares, grads)])]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_elements_that_are_not_finite_are_counted_in_tensors_of_any_length(
    dtype: torch.dtype,
) -> None:
    """Short tensors are left to the loops, and long tensors to torch."""
    bad = [torch.inf, -torch.inf, torch.nan]
    every = []
    for count, size in ((0, 4), (1, squares.SHARED), (3, 7), (0, 0), (2, 2 * squares.SHARED)):
        one = normal(size, seed=size, dtype=dtype)
        one[:count] = torch.tensor(bad[:count], dtype=dtype)
        every.append(one)
    (found,) = count_not_finite_each(every, every, (), ApplyIfFiniteCoefficients())
    assert found.tolist() == [0.0, 1.0, 3.0, 0.0, 2.0]
