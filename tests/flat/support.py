"""Support of the tests of the flat layout: drawn parameters, modules, and their layouts."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from functional_optim.core.buffer_memory import buffer_of
from functional_optim.plan.flat.layout import FlatLayout
from functional_optim.testing.runs import LAYOUTS, laid_out

SHAPES = ((), (1,), (0,), (3,), (7,), (2, 2), (5, 2), (4, 2), (2, 0, 3), (1, 2, 1, 2), (2, 3, 2, 2))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
KEYS = (None, "a", ("b", 1))


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return a contiguous tensor that owns its memory."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).clone()


@dataclass(frozen=True)
class Drawn:
    """Parameter that Hypothesis draws."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    module: bool
    requires_grad: bool
    key: object

    def make(self, seed: int) -> Tensor:
        tensor = laid_out(values(self.shape, self.dtype, seed), self.layout)
        if self.module:
            return torch.nn.Parameter(tensor, requires_grad=self.requires_grad)
        return tensor.requires_grad_(self.requires_grad)

    @property
    def stays(self) -> bool:
        """Return True if the parameter cannot move: it has gaps, or is a view of another tensor."""
        sliced = self.layout == "sliced" and len(self.shape) > 0
        turned = self.layout == "transposed" and len(self.shape) > 1
        has_gaps = sliced and torch.Size(self.shape).numel() > 0
        return has_gaps or (not self.module and (sliced or turned))

    def gradient(self, seed: int, layout: str) -> Tensor:
        """Return a gradient with its own memory layout."""
        return laid_out(values(self.shape, self.dtype, seed + 1000), layout)


drawn = st.builds(
    Drawn,
    st.sampled_from(SHAPES),
    st.sampled_from(DTYPES),
    st.sampled_from(LAYOUTS),
    st.booleans(),
    st.booleans(),
    st.sampled_from(KEYS),
)
several = st.lists(drawn, min_size=1, max_size=6)
aligns = st.sampled_from([1, 2, 3, 16])


def make_all(ones: list[Drawn]) -> list[Tensor]:
    return [one.make(seed) for seed, one in enumerate(ones)]


def flatten(params: list[Tensor], ones: list[Drawn] | None = None, align: int = 1) -> FlatLayout:
    keys = None if ones is None else [one.key for one in ones]
    return FlatLayout(params, [f"p{i}" for i in range(len(params))], keys=keys, align=align)


def of_module(module: torch.nn.Module, **options: int) -> FlatLayout:
    named = dict(module.named_parameters())
    return FlatLayout(list(named.values()), list(named), **options)


def lives_in(layout: FlatLayout, param: Tensor) -> bool:
    return any(buffer_of(param) is one.data for one in layout.buffers)
