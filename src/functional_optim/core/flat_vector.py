"""Tree of parameters as one flat real vector, in the order of torch.optim."""

import itertools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from functional_optim.core.checks import check_fit, check_params
from functional_optim.core.dtensors import is_dtensor
from functional_optim.core.tree import flatten, flatten_like, path_name, unflatten
from functional_optim.core.views import complex_view, real_view


class FlatVector(NamedTuple):
    """Parameters of a tree, and their positions in the tree."""

    params: list[Tensor]
    """In the order of :func:`leaf_order`, without None."""
    names: list[str]
    positions: list[int]
    """The index of each parameter among the leaves of ``spec``."""
    spec: optree.PyTreeSpec
    checksum: int
    """Of names and shapes in order. Trees with equal checksums have the same flat vector."""

    @property
    def numel(self) -> int:
        """The length of the flat vector."""
        return sum(map(real_numel, self.params))

    def unflatten(self, params: Sequence[Tensor], like: Any, namespace: str) -> Any:
        """Return a tree like ``like`` with other tensors in place of the parameters."""
        leaves: list[Any] = [None] * self.spec.num_leaves
        for position, param in zip(self.positions, params, strict=True):
            leaves[position] = param
        return unflatten(self.spec, like, namespace, leaves)[0]

    def gradients(self, grads: Any, what: str = "gradients") -> list[Tensor | None]:
        """Return the gradients in the order of the parameters, after checks."""
        leaves = flatten_like(self.spec, grads, what)
        found = [leaves[position] for position in self.positions]
        extra = set(range(len(leaves))) - set(self.positions)
        if any(leaves[position] is not None for position in extra):
            raise ValueError(f"there are {what} where params have None: pass None there")
        for name, param, grad in zip(self.names, self.params, found, strict=True):
            if grad is not None:
                check_fit(param, grad, name)
        return found


def flatten_params(params: Any, namespace: str) -> FlatVector:
    """Flatten and check a tree of parameters."""
    leaves, spec = flatten(params, namespace)
    paths = spec.paths()
    check_params(leaves, paths)
    positions = [at for at in leaf_order(params, namespace) if leaves[at] is not None]
    kept = [leaves[at] for at in positions]
    names = [path_name(paths[at]) for at in positions]
    check_one_device(names, kept)
    sizes = [(name, tuple(param.shape)) for name, param in zip(names, kept, strict=True)]
    return FlatVector(kept, names, positions, spec, zlib.crc32(repr(sizes).encode()))


def check_one_device(names: Sequence[str], params: Sequence[Tensor]) -> None:
    """Raise ValueError for a DTensor, or for parameters on several devices."""
    for name, param in zip(names, params, strict=True):
        if is_dtensor(param):
            raise ValueError(
                f"the parameter at {name!r} is a DTensor; a flat vector over all parameters needs "
                "whole tensors on one device: give param.full_tensor()"
            )
        if param.device != params[0].device:
            raise ValueError(
                f"the parameter at {name!r} is on {param.device}, and the one at {names[0]!r} on "
                f"{params[0].device}; a flat vector over all parameters is on one device"
            )


def leaf_order(tree: Any, namespace: str) -> list[int]:
    """Return the indices of a tree's leaves, with the keys of each dict in order of insertion.

    optree sorts the keys of a dict; torch.optim numbers parameters in order of insertion.
    """
    return _order_of(tree, namespace, itertools.count())


def _order_of(node: Any, namespace: str, numbers: Iterator[int]) -> list[int]:
    if optree.tree_is_leaf(node, none_is_leaf=True, namespace=namespace):
        return [next(numbers)]
    level = optree.tree_flatten_one_level(node, none_is_leaf=True, namespace=namespace)
    parts = [_order_of(child, namespace, numbers) for child in level[0]]
    if isinstance(node, dict) and set(node) == set(level[2]):
        by_key = dict(zip(level[2], parts, strict=True))
        parts = [by_key[key] for key in node]
    return [number for part in parts for number in part]


def real_numel(param: Tensor) -> int:
    """Return the number of elements of a parameter in the flat vector."""
    return param.numel() * (2 if param.is_complex() else 1)


def flatten_grads(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Tensor:
    """Concatenate gradients to one flat, real, dense vector, with zeros for missing gradients.

    A complex gradient becomes pairs of real and imaginary parts. Dtypes are promoted as by
    ``torch.cat``.
    """
    parts = []
    for param, grad in zip(params, grads, strict=True):
        part = torch.zeros_like(param) if grad is None else grad.detach()
        part = part if part.layout == torch.strided else part.to_dense()
        part = part.reshape(-1)
        parts.append(torch.view_as_real(part).reshape(-1) if part.is_complex() else part)
    return torch.cat(parts)


def add_direction(
    params: Sequence[Tensor], step: float | Tensor, direction: Tensor
) -> list[Tensor]:
    """Return ``param + step * direction`` for each parameter, for a flat vector ``direction``."""
    found = []
    start = 0
    for param in params:
        real = real_view(param)
        part = direction[start : start + real.numel()].view(real.shape)
        # The flat vector may have a wider dtype than the parameter.
        added = torch.add(real, part, alpha=float(step)).to(real.dtype)
        found.append(complex_view(added) if param.is_complex() else added)
        start += real.numel()
    return found
