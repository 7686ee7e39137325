"""Trees of parameters: flattening, paths of leaves, and errors for different trees."""

from typing import Any

import optree
from torch import Tensor

from functional_optim.core.state import LeafState, State

Path = tuple[Any, ...]
"""The keys from the root of the tree of params to a leaf."""


def flatten(tree: Any, namespace: str) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the leaves, including None, and the structure of a tree."""
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=namespace)
    return leaves, spec


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree, in order."""
    return [one for one in optree.tree_leaves(tree) if isinstance(one, Tensor)]


def leaf_paths(params: Any, namespace: str = "") -> list[Path]:
    """Return the path of every leaf of a tree of params, in the order of the leaves.

    Args:
        params: a pytree of parameters; None counts as a leaf.
        namespace: optree's namespace of registered nodes.

    Returns:
        One tuple of keys for each leaf, from the root down.

    Example::

        >>> import torch
        >>> leaf_paths({"b": torch.ones(1), "a": [torch.ones(2), None]})
        [('a', 0), ('a', 1), ('b',)]
    """
    _, spec = flatten(params, namespace)
    return list(spec.paths())


def path_name(path: Path) -> str:
    """Return the name of a path, such as ``layers.0.weight``; ``<root>`` for a lone tensor."""
    return ".".join(str(key) for key in path) or "<root>"


def unflatten(spec: optree.PyTreeSpec, tree: Any, namespace: str, *leaves: list[Any]) -> list[Any]:
    """Return a tree like ``tree``, of structure ``spec``, for each list of leaves."""
    if type(spec) is not optree.PyTreeSpec:
        # After a graph break, torch.compile's replacement of the structure cannot be used.
        spec = flatten(tree, namespace)[1]
    return [spec.unflatten(own) for own in leaves]


def flatten_like(spec: optree.PyTreeSpec, tree: Any, what: str) -> list[Any]:
    """Return the subtrees at the leaves of ``spec``, or raise ValueError with a different path."""
    try:
        return spec.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(_format_difference(spec, tree, what, error)) from None


def _format_difference(spec: optree.PyTreeSpec, tree: Any, what: str, error: ValueError) -> str:
    wanted = {path_name(path) for path in spec.paths()}
    found_paths, _, _ = optree.tree_flatten_with_path(
        tree,
        is_leaf=lambda node: isinstance(node, LeafState),
        none_is_leaf=True,
        namespace=spec.namespace,
    )
    found = {path_name(path) for path in found_paths}
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    if missing or extra:
        parts = [f"no {what} at {missing[0]!r}"] if missing else []
        parts += [f"{what} at {extra[0]!r}, where params have no leaf"] if extra else []
        detail = "; ".join(parts)
    else:
        detail = str(error)
    return (
        f"the tree of {what} must be that of params ({len(wanted)} leaves; use None where there "
        f"is none): {detail}"
    )


def leaf_states(spec: optree.PyTreeSpec, state: Any) -> list[Any]:
    """Return the leaf states of ``state`` in the order of the leaves of params."""
    if not isinstance(state, State):
        raise TypeError(
            f"state must be the State that init or update returned, got {type(state).__name__}"
        )
    return flatten_like(spec, state.leaves, "state")
