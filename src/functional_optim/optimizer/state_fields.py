"""The state of an optimizer, one field at a time: read and replaced as a tree like params."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import optree
from torch import Tensor

from functional_optim.core.aliasing import laid_as
from functional_optim.core.brief import brief
from functional_optim.core.dtensors import is_sharded
from functional_optim.core.links import state_names
from functional_optim.core.local_shards import check_same_places
from functional_optim.core.scalars import concrete
from functional_optim.core.stage import Stage
from functional_optim.core.state import LeafState, State, field_tensors
from functional_optim.core.tree import flatten_like, path_name
from functional_optim.optimizer import Optimizer

STEP = "step"
_PART = re.compile(r"(.+)\[(\d+)\]")


_Stages = tuple[Stage, ...]


class _Place(NamedTuple):
    """Position of a field in each leaf's state."""

    name: str
    stage: int | None
    """Which stage keeps it; None for the step count."""
    field: str
    part: int | None
    """Which of a field's several tensors; None where it has one at most."""


def state_field(optimizer: Optimizer, state: State, name: str, *, params: Any = None) -> Any:
    """Return one field of the state, for all leaves.

    Args:
        optimizer: whose state it is.
        state: what ``init``, ``update`` or a bound optimizer's ``state`` gave.
        name: as in dicts of state and checkpoints: ``"step"``, the name of a field
            (``"exp_avg"``), or ``"stage.field"`` where two stages have a field of that name; of a
            field with several tensors, ``"field[0]"`` is the first.
        params: the tree of parameters; needed where leaves differ in their stages.

    Returns:
        The tree of params with that tensor in place of each parameter: the state's own tensor, not
        a copy. None where a leaf has none: where the parameter is None, or an option leaves the
        field out.

    Raises:
        TypeError: ``state`` is no State.
        ValueError: a name that the chain does not have; a state of another optimizer.

    Example::

        >>> import torch
        >>> from functional_optim import adamw
        >>> optimizer, params = adamw(lr=0.1), {"w": torch.ones(2), "b": None}
        >>> state_field(optimizer, optimizer.init(params), "exp_avg")
        {'w': tensor([0., 0.]), 'b': None}
    """
    leaves, spec, chains = _leaves(optimizer, state, params)
    places = _places(chains, name)
    found = [
        _tensor(leaf, places[chain], path_name(path))
        for path, leaf, chain in zip(spec.paths(), leaves, chains, strict=True)
    ]
    return spec.unflatten(found)


def with_state_field(
    optimizer: Optimizer, state: State, name: str, tree: Any, *, params: Any = None
) -> State:
    """Return the state with other tensors in one field; the arguments do not change.

    Args:
        optimizer: whose state it is.
        state: as for :func:`state_field`.
        name: as for :func:`state_field`.
        tree: what :func:`state_field` returns, with other tensors of the same shapes, dtypes and
            devices. They are copied, with their derivatives.
        params: as for :func:`state_field`.

    Returns:
        A State that shares all other tensors with ``state``.

    Raises:
        TypeError: ``state`` is no State, or something in ``tree`` is no tensor.
        ValueError: a name that the chain does not have; another tree; a tensor of another shape,
            dtype, device or layout, or one where the leaf has none, or None where it has one; a
            step count below 0. Each names the leaf.

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
    places = _places(chains, name)
    made: list[LeafState | None] = []
    news = flatten_like(spec, tree, name)
    for path, leaf, new, chain in zip(spec.paths(), leaves, news, chains, strict=True):
        where, place = path_name(path), places[chain]
        old = _tensor(leaf, place, where)
        _check(f"{name} at {where!r}", old, new)
        if leaf is None or old is None or place is None:
            made.append(leaf)
        else:
            made.append(_replaced(leaf, place, old, new))
    return state._replace(leaves=spec.unflatten(made))


def _places(chains: Sequence[_Stages], name: str) -> dict[_Stages, _Place | None]:
    """Return the position of a field in each chain; None in chains without it.

    Raises:
        ValueError: no chain has one of this name.
    """
    found = {chain: _place(chain, name) for chain in {*chains}}
    if not any(found.values()):
        fields = [names for chain in {*chains} for names in state_names(chain)]
        known = dict.fromkeys(one for names in fields for one in names)
        raise ValueError(
            f"this chain has no field of state {brief(name)}; its state has "
            f"{', '.join([STEP, *known])}"
        )
    return found


def _place(stages: _Stages, name: str) -> _Place | None:
    """Return the position of a field in a chain, if it has the field."""
    known = {
        full: (index, field)
        for index, (stage, names) in enumerate(zip(stages, state_names(stages), strict=True))
        for full, field in zip(names, stage.state._fields if names else (), strict=True)
    }
    if name == STEP:
        return _Place(name, None, name, None)
    if name in known:
        return _Place(name, *known[name], None)
    match = _PART.fullmatch(str(name))
    if match is not None and match[1] in known:
        return _Place(name, *known[match[1]], int(match[2]))
    return None


def _leaves(
    optimizer: Optimizer, state: Any, params: Any
) -> tuple[list[Any], optree.PyTreeSpec, list[_Stages]]:
    """The states of the leaves, None among them, the tree of params, and the stages of each leaf.

    Raises:
        TypeError: it is no State; leaves differ in their stages, and the parameters are not given.
        ValueError: it is that of another optimizer.
    """
    if not isinstance(state, State):
        raise TypeError(f"state must be the State that init or update returned, got {brief(state)}")
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
        wanted = [stage.state if stage.stateful else tuple for stage in stages]
        if leaf is None:
            continue
        if not isinstance(leaf, LeafState) or list(map(type, leaf.stages)) != wanted:
            raise ValueError(
                f"the state at {path_name(path)!r} is of another optimizer than "
                f"{', '.join(stage.name for stage in stages)}; give the one that made it"
            )
    return leaves, spec, chains


def _tensor(leaf: LeafState | None, place: _Place | None, where: str) -> Tensor | None:
    """The tensor of a leaf that stands at a place, if there is one.

    Raises:
        ValueError: the field has several, and none is named; or it is one, and a part is named.
    """
    if leaf is None or place is None:
        return None
    if place.stage is None:
        return leaf.step
    value = getattr(leaf.stages[place.stage], place.field)
    tensors = field_tensors(value)
    if place.part is None and len(tensors) > 1:
        parts = ", ".join(f"{place.name}[{part}]" for part in range(len(tensors)))
        raise ValueError(
            f"{place.name} at {where!r} is {len(tensors)} tensors; name one of them: {parts}"
        )
    if place.part is not None and not isinstance(value, list):
        raise ValueError(
            f"{place.name} at {where!r}: the field is one tensor, and has no parts; name it "
            f"{place.name.rpartition('[')[0]}"
        )
    part = place.part or 0
    return tensors[part] if part < len(tensors) else None


def _check(label: str, old: Tensor | None, new: Any) -> None:
    """Check that a value can replace another.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is of another shape, dtype, device or layout; there is one where there was
            none, or none where there was one.
    """
    if old is None and new is None:
        return
    if new is not None and not isinstance(new, Tensor):
        raise TypeError(f"{label} must be a tensor or None, got {brief(new)}")
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
    if is_sharded(old):
        check_same_places(old, new, label)
    if label.startswith(f"{STEP} at") and (concrete(new) or 0.0) < 0:
        raise ValueError(f"{label} must be a whole number >= 0, got {int(new)}")


def _kind(tensor: Tensor) -> str:
    return "DTensor" if is_sharded(tensor) else "Tensor"


def _replaced(leaf: LeafState, place: _Place, old: Tensor, new: Tensor) -> LeafState:
    """The state of a leaf with a copy of another tensor, laid out in memory as the old one is."""
    copy = laid_as(new.clone(), old)
    if place.stage is None:
        return leaf._replace(step=copy)
    before = leaf.stages[place.stage]
    value = getattr(before, place.field)
    if isinstance(value, list):
        value = [copy if part == (place.part or 0) else one for part, one in enumerate(value)]
    else:
        value = copy
    after = before._replace(**{place.field: value})
    stages = (*leaf.stages[: place.stage], after, *leaf.stages[place.stage + 1 :])
    return leaf._replace(stages=stages)
