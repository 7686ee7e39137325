"""Checks of leaves whose operations must be seen, so that no kernel may step them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch import is_functorch_wrapped_tensor, tangent_of
from functional_optim.core.leaf import PLAIN, Leaf
from functional_optim.kernels.chunks import tensors_of


def has_dispatch(leaf: Leaf) -> bool:
    """Return True if a tensor has no memory of its own, but operations, as FakeTensor has."""
    own = Tensor.__torch_dispatch__
    return any(type(one).__torch_dispatch__ is not own for one in tensors_of(leaf))


def are_plain(leaves: Sequence[Leaf]) -> bool:
    """Return True if no tensor is of a class with operations of its own."""
    return PLAIN.issuperset(type(one) for leaf in leaves for one in tensors_of(leaf))


def is_followed(leaf: Leaf) -> bool:
    """Return True if a derivative of the step may be needed, which kernels do not give."""
    numbers = isinstance(leaf.step, Tensor) or any(map(holds_tensor, leaf.coefficients))
    return numbers or any(map(is_followed_tensor, tensors_of(leaf)))


def holds_tensor(value: Any) -> bool:
    """Return True for a tensor, and for a tuple or list with one in it."""
    if isinstance(value, (tuple, list)):
        return any(map(holds_tensor, value))
    return isinstance(value, Tensor)


def is_followed_tensor(tensor: Tensor) -> bool:
    """Return True if a derivative with respect to a tensor may be needed."""
    if is_functorch_wrapped_tensor(tensor):
        return True
    if torch.is_grad_enabled() and tensor.requires_grad:
        return True
    return tangent_of(tensor) is not None
