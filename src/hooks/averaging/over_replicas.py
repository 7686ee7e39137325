"""A function of one replica, done for all: at once, or one after the other."""

from collections.abc import Callable
from typing import Any

import optree
import torch

_tree: Any = optree  # whose annotations have trees of trees only

Function = Callable[..., Any]
OverReplicas = Callable[[Function], Function]
"""Makes of a function of one replica's trees of tensors one of all replicas', stacked."""


def at_once(function: Function) -> Function:
    """By ``torch.func.vmap``: one operation for all replicas, each with random numbers of its own.

    A product of matrices is a product of stacks of them, which may round otherwise than each alone;
    what is computed for each element is the same, bit for bit.

    Args:
        function: takes and returns trees of tensors.

    Example::

        >>> at_once(torch.sum)(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([3., 7.])
    """
    mapped: Function = torch.func.vmap(function, randomness="different")
    return mapped


def one_by_one(function: Function) -> Function:
    """In a loop: each replica as it would be alone, bit for bit.

    Args:
        function: takes and returns trees of tensors.

    Example::

        >>> one_by_one(torch.sum)(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([3., 7.])
    """

    def mapped(*trees: Any) -> Any:
        size = len(_tree.tree_leaves(trees)[0])
        done = [function(*slice_of(trees, number)) for number in range(size)]
        return stacked(*done)

    return mapped


def slice_of(trees: Any, number: int) -> Any:
    """Trees of one replica, cut from those of all."""
    return _tree.tree_map(lambda tensor: tensor[number], trees)


def stacked(*trees: Any) -> Any:
    """Trees of replicas as one: the inverse."""
    return _tree.tree_map(lambda *slices: torch.stack(slices), *trees)
