"""Comparison of tensors and states, with an error message that names the first difference."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import optree
import torch
from torch import Tensor

from functional_optim._torch.tensors import has_versions, version_of


def same(a: Tensor, b: Tensor) -> bool:
    """Return True if dtypes, shapes and all elements are equal. NaN equals NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    equal = (a == b) | (a.isnan() & b.isnan())
    return bool(equal.all())


def close(a: Tensor, b: Tensor, ulps: float) -> bool:
    """Return True if tensors are equal within ``ulps`` units in the last place.

    The unit is that of the largest magnitude in both tensors.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if same(a, b) or a.numel() == 0:
        return True
    x, y = _wide(a), _wide(b)
    scale = max(float(x.abs().max()), float(y.abs().max()))
    return bool((x - y).abs().max() <= ulps * torch.finfo(a.dtype).eps * scale)


def require_same(label: str, got: Any, want: Any, ulps: float = 0.0) -> None:
    """Raise AssertionError if two trees of tensors differ. The message names the first leaf."""
    got_paths, got_leaves, got_spec = optree.tree_flatten_with_path(got)
    _, want_leaves, want_spec = optree.tree_flatten_with_path(want)
    if got_spec != want_spec:
        raise AssertionError(f"{label}: structure {got_spec}, expected {want_spec}")
    for path, a, b in zip(got_paths, got_leaves, want_leaves, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            equal = a == b
        else:
            equal = same(a, b) if ulps == 0.0 else close(a, b, ulps)
        if not equal:
            where = ".".join(str(key) for key in path)
            bound = "bit for bit" if ulps == 0.0 else f"within {ulps:g} ulp"
            raise AssertionError(f"{label} differ at {where!r} ({bound}): {_pair(a, b)}")


ROUNDINGS = 16
"""Allowed difference of two computations of a run, in roundings to the coarsest dtype."""


def require_near(
    label: str, got: Any, way: Sequence[Any], coarsest: torch.dtype, *, beside: Sequence[Any] = ()
) -> None:
    """Raise AssertionError if a tree is not close to the end of a path of several steps.

    The allowed distance is :data:`ROUNDINGS` times the length of the path of a tensor times the eps
    of ``coarsest``, plus the same for the tensor itself in its own dtype. Tensors that are not
    floating must be equal. ``way`` has the trees before the first step and after each step. The
    length of the path ``beside`` is added: its steps do not cancel each other.
    """
    columns = zip(*map(optree.tree_leaves, (got, *way)), strict=True)
    others = [list(one) for one in zip(*map(optree.tree_leaves, beside), strict=True)]
    for place, (a, *been) in enumerate(columns):
        b = been[-1]
        if not isinstance(a, Tensor) or not (a.is_floating_point() or a.is_complex()):
            require_same(label, a, b)
            continue
        if a.dtype != b.dtype or a.shape != b.shape:
            raise AssertionError(f"{label} differ at leaf {place}: {_pair(a, b)}")
        length = _length(been) + _length(others[place] if others else [])
        room = length * torch.finfo(coarsest).eps
        room += float(_wide(b).norm()) * torch.finfo(b.dtype).eps
        if not same(a, b) and not float((_wide(a) - _wide(b)).norm()) <= ROUNDINGS * room:
            raise AssertionError(
                f"{label} differ at leaf {place} by more than {ROUNDINGS} roundings of their way "
                f"in {coarsest}: {_pair(a, b)}"
            )


def _length(way: Sequence[Tensor]) -> float:
    """Return the length of a path of several steps."""
    return sum(float((_wide(new) - _wide(old)).norm()) for old, new in pairwise(way))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _pair(got: Any, want: Any) -> str:
    if isinstance(got, Tensor) and isinstance(want, Tensor) and got.shape == want.shape:
        flat_got, flat_want = got.reshape(-1), want.reshape(-1)
        odd = ~((flat_got == flat_want) | (flat_got.isnan() & flat_want.isnan()))
        where = int(odd.nonzero()[0]) if bool(odd.any()) else 0
        if flat_got.numel() > 0:
            got_one, want_one = flat_got[where].item(), flat_want[where].item()
            return f"element {where} is {got_one!r}, expected {want_one!r}"
    return f"{got!r}, expected {want!r}"


def tensors_in(tree: Any) -> list[Any]:
    """Return the leaves of a tree."""
    found: list[Any] = optree.tree_leaves(tree)
    return found


def versions(tree: Any) -> list[int]:
    """Return the version counter of each tensor of a tree; [] if torch has no counters."""
    return [version_of(leaf) for leaf in tensors_in(tree)] if has_versions else []


def snapshot(tree: Any) -> Any:
    """Copy a tree of tensors."""
    return optree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)
