"""Layout of gradients in a bucket: that of their parameters, if these are dense."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hooks.buckets import gradient_views, is_dense
from tests.choices import case, examples


@st.composite
def layouts(draw: st.DrawFn) -> Tensor:
    """Draw a tensor with elements, with permuted or arbitrary strides."""
    sizes = draw(st.lists(st.integers(1, 3), max_size=4))
    if draw(st.booleans()):
        order = draw(st.permutations(range(len(sizes))))
        return torch.empty([sizes[one] for one in order]).permute(order)
    strides = draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    return torch.empty_strided(sizes, strides)


@examples(50)
@given(layouts())
def test_dense_as_torch_says(tensor: Tensor) -> None:
    assert is_dense(tensor) == torch.ops.aten.is_non_overlapping_and_dense(tensor)


PARAMS = {
    "one": torch.randn(3, 4),
    "transposed": torch.randn(4, 3).t(),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "sliced": torch.randn(6, 4)[::2, 1:3],  # with gaps: DDP stores its gradient contiguously
    "0-d": torch.randn(()),
    "empty": torch.randn(0, 3),
}


def test_views_one_after_the_other() -> None:
    """Each view covers its own part of the buffer, in the memory order of its parameter."""
    for dtype in (torch.float32, torch.complex64):
        params = [param.to(dtype) for param in PARAMS.values()]
        numel = sum(param.numel() for param in params) * (2 if dtype.is_complex else 1)
        buffer = torch.arange(numel, dtype=torch.float32)
        start = 0
        for name, param, view in zip(PARAMS, params, gradient_views(buffer, params), strict=True):
            with case(dtype=dtype, param=name):
                assert (view.shape, view.dtype) == (param.shape, param.dtype)
                real = torch.view_as_real(view) if view.is_complex() else view
                dense = is_dense(param)
                assert view.stride() == param.stride() if dense else view.is_contiguous()
                elements = real.flatten().sort().values.tolist()
                assert elements == list(range(start, start + real.numel()))
                start += real.numel()
