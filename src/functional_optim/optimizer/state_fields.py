"""Single fields of the state of an optimizer, as trees like params."""

import re
from collections.abc import Collection, Sequence
from typing import Any

import optree
from torch import Tensor

from functional_optim.core.aliasing import match_strides
from functional_optim.core.dtensors import is_dtensor
from functional_optim.core.format import format_value
from functional_optim.core.links import state_names
from functional_optim.core.local_shards import check_same_places
from functional_optim.core.scalars import concrete
from functional_optim.core.stage import Stage
from functional_optim.core.state import LeafState, State, field_tensors, map_state
from functional_optim.core.tree import flatten_like, path_name
from functional_optim.optimizer import Optimizer

STEP = "step"
_INDEXED = re.compile(r"(.+)\[(\d+)\]")

_Stages = tuple[Stage, ...]


def state_field(optimizer: Optimizer, state: State, name: str, *, params: Any = None) -> Any:
    """Return one field of the state, for all leaves.

    Args:
        optimizer: the optimizer of the state.
        state: the result of ``init`` or ``update``, or the ``state`` of a bound optimizer.
        name: as in dicts of state and checkpoints: ``"step"``, the name of a field
            (``"exp_avg"``), or ``"stage.field"`` if two stages have a field of that name. If a
            field has several tensors, ``"field[0]"`` is the first.
        params: the tree of parameters, which is needed if leaves differ in their stages.

    Returns:
        A tree like params with the tensors of the state, not copies. It has None for leaves without
        such a tensor: the parameter is None, or an option removes the field.

    Raises:
        TypeError: ``state`` is not a State.
        ValueError: the chain has no such field; the state is of another optimizer.

    Example::

        >>> import torch
        >>> from functional_optim import adamw
        >>> optimizer, params = adamw(lr=0.1), {"w": torch.ones(2), "b": None}
        >>> state_field(optimizer, optimizer.init(params), "exp_avg")
        {'w': tensor([0., 0.]), 'b': None}
    """
    leaves, spec, chains = _leaves(optimizer, state, params)
    _require_field(chains, name)
    found = [
        _tensor(leaf, chain, name, path_name(path))
        for path, leaf, chain in zip(spec.paths(), leaves, chains, strict=True)
    ]
    return spec.unflatten(found)


def with_state_field(
    optimizer: Optimizer, state: State, name: str, tree: Any, *, params: Any = None
) -> State:
    """Return the state with other tensors in one field; the arguments do not change.

    Args:
        optimizer: the optimizer of the state.
        state: as for :func:`state_field`.
        name: as for :func:`state_field`.
        tree: a tree like the result of :func:`state_field`, with other tensors of the same shapes,
            dtypes and devices. They are copied, and the copies are differentiable.
        params: as for :func:`state_field`.

    Returns:
        A State that shares all other tensors with ``state``.

    Raises:
        TypeError: ``state`` is not a State, or a value in ``tree`` is not a tensor.
        ValueError: the chain has no such field; the trees differ; a tensor has another shape,
            dtype, device or layout; a tensor is missing, or the leaf has no such tensor; a step
            count is negative. The error names the leaf.

    Example::

        >>> import torch
        >>> from functional_optim import adamw
        >>> optimizer, params = adamw(lr=0.1), {"w": torch.ones(2)}
        >>> state = optimizer.init(params)
        >>> started = with_state_field(optimizer, state, "exp_avg", {"w": torch.full((2,), 0.5)})
        >>> started.leaves["w"].stages[-1].exp_avg
        tensor([0.5000, 0.5000])
    """
    leaves, spec, chains = _leaves(optimizer, state, params)
    _require_field(chains, name)
    made: list[LeafState | None] = []
    news = flatten_like(spec, tree, name)
    for path, leaf, new, chain in zip(spec.paths(), leaves, news, chains, strict=True):
        leaf_name = path_name(path)
        old = _tensor(leaf, chain, name, leaf_name)
        _check(f"{name} at {leaf_name!r}", old, new)
        made.append(leaf if leaf is None or old is None else _replace(leaf, old, new))
    return state._replace(leaves=spec.unflatten(made))


def _require_field(chains: Sequence[_Stages], name: str) -> None:
    """Raise ValueError if no chain has the field."""
    names = [own for chain in {*chains} for own in state_names(chain)]
    known = dict.fromkeys(one for own in names for one in own)
    if name != STEP and _split_index(name, known)[0] not in known:
        raise ValueError(
            f"this chain has no field of state {format_value(name)}; its state has "
            f"{', '.join([STEP, *known])}"
        )


def _split_index(name: str, known: Collection[str]) -> tuple[str, int | None]:
    """Return the field and the index of a tensor in it, if ``name`` is ``field[index]``."""
    match = _INDEXED.fullmatch(str(name))
    if match is not None and name not in known and match[1] in known:
        return match[1], int(match[2])
    return name, None


def _leaves(
    optimizer: Optimizer, state: Any, params: Any
) -> tuple[list[Any], optree.PyTreeSpec, list[_Stages]]:
    """Return the state of each leaf (or None), the tree of params, and the stages of each leaf."""
    if not isinstance(state, State):
        raise TypeError(
            f"state must be the State that init or update returned, got {format_value(state)}"
        )
    leaves, spec = optree.tree_flatten(
        state.leaves,
        is_leaf=lambda node: isinstance(node, LeafState),
        none_is_leaf=True,
        namespace=optimizer.namespace,
    )
    chains = [optimizer.stages] * len(leaves)
    if any(link.where is not None for link in optimizer.links):
        if params is None:
            raise TypeError("leaves differ in their stages: give params=, the tree of parameters")
        chains = [one.stages for one in optimizer.chains_for(params)]
    for path, leaf, stages in zip(spec.paths(), leaves, chains, strict=True):
        wanted = [stage.state_class for stage in stages]
        if leaf is None:
            continue
        if not isinstance(leaf, LeafState) or list(map(type, leaf.stages)) != wanted:
            raise ValueError(
                f"the state at {path_name(path)!r} is of another optimizer than "
                f"{', '.join(stage.name for stage in stages)}; give the one that made it"
            )
    return leaves, spec, chains


def _tensor(leaf: LeafState | None, stages: _Stages, name: str, leaf_name: str) -> Tensor | None:
    """Return the tensor of a field, or None if the leaf has no such tensor."""
    if leaf is None or name == STEP:
        return None if leaf is None else leaf.step
    values: dict[str, Any] = {}
    for names, one in zip(state_names(stages), leaf.stages, strict=True):
        values.update(zip(names, one, strict=True))
    field, part = _split_index(name, values)
    if field not in values:
        return None
    tensors = field_tensors(values[field])
    if part is None and len(tensors) > 1:
        parts = ", ".join(f"{name}[{part}]" for part in range(len(tensors)))
        raise ValueError(
            f"{name} at {leaf_name!r} is {len(tensors)} tensors; name one of them: {parts}"
        )
    if part is not None and not isinstance(values[field], list):
        raise ValueError(
            f"{name} at {leaf_name!r}: the field is one tensor, and has no parts; name it {field}"
        )
    return next(iter(tensors[part or 0 :]), None)


def _check(label: str, old: Tensor | None, new: Any) -> None:
    """Raise TypeError or ValueError if ``new`` cannot replace ``old``."""
    if old is None and new is None:
        return
    if new is not None and not isinstance(new, Tensor):
        raise TypeError(f"{label} must be a tensor or None, got {format_value(new)}")
    if old is None:
        raise ValueError(f"{label}: the leaf has no such tensor; leave None there")
    if new is None:
        raise ValueError(
            f"{label} is None, and the leaf has such a tensor: give one, such as that of "
            "state_field, which stays as it is"
        )
    for what, got, want in (
        ("shape", tuple(new.shape), tuple(old.shape)),
        ("dtype", new.dtype, old.dtype),
        ("device", new.device, old.device),
        ("layout", new.layout, old.layout),
        ("kind", _kind(new), _kind(old)),
    ):
        if got != want:
            raise ValueError(f"{label} has {what} {got}, and must have {what} {want}")
    if is_dtensor(old):
        check_same_places(old, new, label)
    if label.startswith(f"{STEP} at") and (concrete(new) or 0.0) < 0:
        raise ValueError(f"{label} must be a whole number >= 0, got {int(new)}")


def _kind(tensor: Tensor) -> str:
    return "DTensor" if is_dtensor(tensor) else "Tensor"


def _replace(leaf: LeafState, old: Tensor, new: Tensor) -> LeafState:
    """Return the state of a leaf with a copy of ``new``, which has the strides of ``old``."""
    copy = match_strides(new.clone(), old)
    if old is leaf.step:
        return leaf._replace(step=copy)
    stages = [map_state(lambda one: copy if one is old else one, own) for own in leaf.stages]
    return leaf._replace(stages=tuple(stages))
