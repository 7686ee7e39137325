"""torch's parameter groups and dicts of state: read, completed, loaded and written."""

from collections.abc import Mapping, MutableMapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.first_state import with_first_values
from functional_optim.core.initial import init_leaf
from functional_optim.core.links import Links
from functional_optim.core.stage import Stage
from functional_optim.core.state import GateCounts, LeafState
from functional_optim.core.torch_state import (
    StateLayout,
    from_entries,
    has_begun,
    kept_dtypes,
    state_layout,
    to_entries,
)
from functional_optim.frontends.torch_checkpoint import (
    DECOUPLED,
    checkpoint_entries,
    decay_options,
    decouples,
    with_group_steps,
)
from functional_optim.frontends.torch_groups import FROZEN_OPTIONS
from functional_optim.plan.step_counts import beside
from functional_optim.storage.plain import extras_in, from_any_storage, plain_stages

States = MutableMapping[Tensor, dict[str, Any]]
"""torch's dicts of state, by parameter."""


def leaf_state(
    stages: Sequence[Stage],
    hypers: tuple[Any, ...],
    param: Tensor,
    states: States,
    name: str,
    *,
    begins: bool = True,
    made_for: tuple[Any, ...] | None = None,
) -> LeafState:
    """The state of a parameter, which stands in its dict.

    Where a caller has cleared it, it is made anew. In the first step, what depends on the parameter
    or on hyper-parameters is made of those of now, as torch's classes make theirs then; all else is
    as it stands, since a caller may have written to it.

    Args:
        stages, hypers: of its chain.
        param: whose it is.
        states: torch's dicts, which are written to.
        name: of the parameter, for errors.
        begins: whether it has a gradient, so that this may be its first step.
        made_for: the hyper-parameters that its state was made for, if they may be others.
    """
    entries = states[param]
    layout = state_layout(stages, hypers, param.shape, param.dtype)
    if begins and entries and entries.get("step") == 0:
        state = _first_state(stages, hypers, param, entries, name, made_for, layout)
    else:
        own = stages, hypers, param, entries, name
        state = from_entries(*own, begins_anew=True, layout=layout)
    made = layout.entries(state)
    if not all(map(is_, map(entries.get, made), made.values())):
        states[param] = {**entries, **made}  # also changed by hand, or an option turned on
    return state


def _first_state(
    stages: Sequence[Stage],
    hypers: tuple[Any, ...],
    param: Tensor,
    entries: Mapping[str, Any],
    name: str,
    made_for: tuple[Any, ...] | None,
    layout: StateLayout,
) -> LeafState:
    """The state that a first step begins with; arguments as for :func:`leaf_state`.

    Since entries were made, an option may have been turned on, and the parameter may have another
    dtype, device or shape. Entries are new then, where they do not fit.
    """
    wanted = layout.dtypes
    if not _are_like(param, entries, wanted):
        with torch.no_grad():
            made = layout.entries(init_leaf(stages, hypers, param))
        kinds = {key: (made[key].shape, made[key].device, made[key].dtype) for key in wanted}
        odd = [key for key, kind in kinds.items() if not _is_like(entries.get(key), *kind)]
        entries = {**entries, **{key: made[key] for key in odd}}
    own = stages, hypers, param, entries, name
    state = from_entries(*own, begins_anew=True, counted=True, layout=layout)
    return with_first_values(stages, hypers, param, state, made_for)


def _are_like(param: Tensor, entries: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]) -> bool:
    """Return True if entries are tensors with the shape and the device of a parameter."""
    shape, device = param.shape, param.device
    for key, dtype in dtypes.items():
        one = entries.get(key)
        if not isinstance(one, Tensor) or one.dtype != dtype:
            return False
        if one.shape != shape or one.device != device:
            return False
    return True


def _is_like(entry: Any, shape: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Return True for a tensor of this shape, device and dtype."""
    if not isinstance(entry, Tensor):
        return False
    return (entry.shape, entry.device, entry.dtype) == (shape, device, dtype)


def complete_state(
    stages: Sequence[Stage],
    hypers: tuple[Any, ...],
    group: MutableMapping[str, Any],
    states: States,
) -> None:
    """State for every parameter of a group: what is there, checked, or the initial one.

    Of a class that counts steps in its groups, the count is in each state afterwards.
    """
    if not stages:  # frozen: nothing is kept, but for what was loaded
        for name, value in FROZEN_OPTIONS.items():
            group.setdefault(name, value)
        for param in group["params"]:
            if not states.get(param, True):
                del states[param]
        return
    params = group["params"]
    before = [states.get(param, {}) for param in params]
    layouts = [state_layout(stages, hypers, param.shape, param.dtype) for param in params]
    made = [
        from_entries(
            stages,
            hypers,
            param,
            entries,
            f"params[{k}]",
            group_step=group.get("step"),
            begins_anew=True,
            layout=layout,
        )
        for k, (param, entries, layout) in enumerate(zip(params, before, layouts, strict=True))
    ]
    # The counts of a group are neighbours in memory, so that one call reads all of them.
    steps = beside([state.step for state in made])
    at_gates = [_beside(one) for one in zip(*[state.gates for state in made], strict=True)]
    every = zip(params, before, layouts, made, steps, *at_gates, strict=True)
    for param, entries, layout, state, step, *gates in every:
        now = LeafState(step, state.stages, tuple(gates))
        states[param] = {**entries, **layout.entries(now)}


def _beside(counts: Sequence[GateCounts]) -> list[GateCounts]:
    """Return the counts of leaves at one gate as neighbours in one tensor."""
    runs, held = (beside(column) for column in zip(*counts, strict=True))
    return list(map(GateCounts, runs, held))


def keep_form(
    stages: Sequence[Stage],
    hypers: tuple[Any, ...],
    group: Mapping[str, Any],
    loaded: Sequence[Mapping[str, Any]],
    states: States,
) -> None:
    """Give the loaded state of a group its own form again.

    torch casts every field to the parameter's dtype, which is wrong for one that has its own: it is
    taken from what was loaded. In another storage than a stored chain's, it is converted.

    Args:
        stages: of the group's chain.
        hypers: its hyper-parameters.
        group: with its parameters.
        loaded: for each, its state in the checkpoint.
        states: to be written to.

    Raises:
        ValueError: it cannot be.
    """
    is_stored = plain_stages(stages) != tuple(stages)
    for k, (entries, param) in enumerate(zip(loaded, group["params"], strict=True)):
        given = {name: one.dtype for name, one in entries.items() if isinstance(one, Tensor)}
        dtypes = kept_dtypes(stages, hypers, param.shape, param.dtype)
        as_kept = dtypes.items() <= given.items() and dtypes.keys() >= {*extras_in(given, ())}
        if is_stored and given.keys() - {"step"} and not as_kept:
            state = from_any_storage(
                stages, hypers, param, entries, f"params[{k}]", group_step=group.get("step")
            )
            states[param] = to_entries(stages, hypers, param, state)
            continue
        for name in given.keys() & dtypes.keys():
            found = states[param][name]
            if given[name] == dtypes[name] != found.dtype:
                states[param][name] = entries[name].to(found.device)


def write_checkpoint(
    chains: Sequence[Links],
    groups: Sequence[Mapping[str, Any]],
    state_dict: dict[str, Any],
    made_for: Mapping[int, tuple[Any, ...]],
) -> None:
    """Change a state dict to what torch.optim writes, also how weight decays, if groups keep that.

    Args:
        chains: of each group, with its hyper-parameters.
        groups: of the optimizer.
        state_dict: of it, to be changed.
        made_for: for groups by number, the hyper-parameters for which their state was made.
    """
    written: dict[Any, Any] = dict(state_dict["state"])
    parts = zip(chains, state_dict["param_groups"], groups, strict=True)
    for number, (links, kept, group) in enumerate(parts):
        stages = tuple(link.stage for link in links)
        hypers = tuple(link.hyper for link in links)
        damped = group.get("dampening", 0.0) != 0.0
        for key, param in zip(kept["params"], group["params"], strict=True):
            if not stages:  # torch's strict loaders expect an entry of what requires gradients
                written.setdefault(key, {})
            entries = written.get(key)
            if entries:
                if not has_begun(entries):
                    layout = state_layout(stages, hypers, param.shape, param.dtype)
                    own = f"state[{key}]", made_for.get(number), layout
                    first = _first_state(stages, hypers, param, entries, *own)
                    entries = {**entries, **layout.entries(first)}
                made = checkpoint_entries(stages, hypers, param, entries, damped=damped)
                written[key] = made
    state_dict["state"] = written
    counted = with_group_steps(written, state_dict["param_groups"])
    state_dict["param_groups"] = [
        {**group, **decay_options([link.stage for link in own])}
        for group, own in zip(counted, chains, strict=True)
    ]


def require_same_decay(stages: Sequence[Stage], group: dict[str, Any]) -> None:
    """Take out of a loaded group how weight decays there, which is how it does here.

    Raises:
        ValueError: it is not.
    """
    here = decouples(stages)
    decoupled = group.pop(DECOUPLED, here)
    if bool(decoupled) != here and group.get("weight_decay", 0.0) != 0.0:
        raise ValueError(
            f"this checkpoint has {'decoupled' if decoupled else 'coupled'} weight decay, the "
            f"chain has not: {', '.join(stage.name for stage in stages)}"
        )
