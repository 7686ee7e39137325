"""Comparison of tensors and states, and the sentence that says where they part."""

from typing import Any

import optree
import torch
from torch import Tensor

from functional_optim._torch import has_versions, version_of


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and every element; NaN equals NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    equal = (a == b) | (a.isnan() & b.isnan())
    return bool(equal.all())


def close(a: Tensor, b: Tensor, ulps: float) -> bool:
    """Equal, or within ``ulps`` units in the last place of the largest magnitude in either."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if same(a, b) or a.numel() == 0:
        return True
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    scale = max(float(x.abs().max()), float(y.abs().max()))
    return bool((x - y).abs().max() <= ulps * torch.finfo(a.dtype).eps * scale)


def require_same(label: str, got: Any, want: Any, ulps: float = 0.0) -> None:
    """Raise AssertionError where two trees of tensors differ, naming the first place."""
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
    """The leaves of any tree."""
    found: list[Any] = optree.tree_leaves(tree)
    return found


def versions(tree: Any) -> list[int]:
    """How often each tensor of a tree has been written to, where torch tells."""
    return [version_of(leaf) for leaf in tensors_in(tree)] if has_versions else []


def snapshot(tree: Any) -> Any:
    """A copy of a tree of tensors, for a later :func:`require_same`."""
    return optree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)
