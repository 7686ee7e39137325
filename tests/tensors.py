"""Reproducible tensors, and comparisons of tensors bit for bit."""

import weakref
from typing import Any

import optree
import torch
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """Return the bit patterns: minus zero differs from zero, and NaN equals itself."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous().view(_WORDS[tensor.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors have the same shape, dtype, and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def assert_same(a: Any, b: Any) -> None:
    """Check that two trees of tensors are equal bit for bit."""
    left, spec = optree.tree_flatten(a)
    right, other = optree.tree_flatten(b)
    assert spec == other
    for one, two in zip(left, right, strict=True):
        assert same_bits(one, two)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normally distributed values in new memory."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal numbers, the same for a seed and a shape in every dtype, up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=generator, dtype=wide).to(dtype)


def watched(tree: Any, arrays: list[Any]) -> Any:
    """Copy a tree to memory of numpy, and append weak references to it, to see when it is freed."""

    def copied(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        array = tensor.numpy().copy(order="K")
        arrays.append(weakref.ref(array))
        return torch.from_numpy(array)

    return optree.tree_map(copied, tree, none_is_leaf=True)
