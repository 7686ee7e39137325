"""Conversion between torch's dicts of state and the states of leaves."""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from itertools import chain, islice
from operator import is_
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.callers import is_called_by
from functional_optim.core.leaf import PLAIN, layouts_of
from functional_optim.core.stage import Stage
from functional_optim.core.state import GateCounts, LeafState, state_tensors
from functional_optim.core.state_init import init_leaf, init_stages, zero_count
from functional_optim.core.state_reinit import reinit_state
from functional_optim.core.torch_state import (
    EntryLayout,
    add_new_stages,
    entry_layout,
    entry_layouts,
    from_entries,
    has_begun,
    to_entries,
)
from functional_optim.frontends.torch_checkpoint import (
    checkpoint_entries,
    decay_options,
    with_group_steps,
)
from functional_optim.frontends.torch_groups import FROZEN_OPTIONS
from functional_optim.plan.step_counts import stack_counts
from functional_optim.storage.conversion import (
    find_extras,
    from_any_storage,
    plain_entries,
    plain_form,
    plain_stages,
    refuse_codes,
)

_DISTRIBUTED_CHECKPOINT = "torch.distributed.checkpoint"
"""The package of torch that reads only entries that a state dict has before the load."""

States = MutableMapping[Tensor, dict[str, Any]]
"""torch's dicts of state, by parameter."""

Start = tuple[tuple[Stage, ...], tuple[Any, ...]]
"""Stages and hyper-parameters for which a state was created."""

_COUNT = torch.int64
"""The dtype of step counts."""


def leaf_states(
    stages: Sequence[Stage],
    hypers: tuple[Any, ...],
    params: Sequence[Tensor],
    states: States,
    names: Sequence[str],
    begins: Iterable[bool],
    starts: MutableMapping[Tensor, Start],
) -> list[LeafState]:
    """Return the states of parameters, which share their tensors with the dicts of the parameters.

    If the caller has cleared a dict, new state is created. Before the first step, state that
    depends on the parameter or on hyper-parameters is computed from their current values, as
    torch's classes do in the first step. Other state is not changed, because the caller may have
    written it.

    Args:
        states: torch's dicts of state, which are written to.
        begins: for each parameter, True if this may be its first step: it has a gradient, or a gate
            keeps an earlier gradient.
        starts: the stages and hyper-parameters for which the state of each parameter was created.
            They may differ from ``hypers``, also because a parameter was moved to another group.
    """
    dicts = [states[param] for param in params]
    values: list[Any] = [value for entries in dicts for value in entries.values()]
    own_kinds = [  # layouts, and the number of step counts
        (one.item(),) if type(one) in PLAIN and one.dtype == _COUNT and not one.dim() else kind
        for kind, one in zip(layouts_of(values), values, strict=True)
    ]
    kinds = iter(own_kinds)
    layouts = entry_layouts(stages, hypers, params)
    found, complete = list[LeafState](), set[Any]()
    every = zip(params, layouts_of(list(params)), names, dicts, layouts, begins, strict=True)
    for param, key, name, entries, layout, may_begin in every:
        # Entries with the same keys, layouts and counts as complete entries are complete.
        start = id(starts.get(param)) if may_begin else None
        kind = key, start, *entries, *islice(kinds, len(entries))
        if kind in complete:
            found.append(layout.state(entries.values()))
            continue
        if not entries:
            starts[param] = tuple(stages), hypers
        own = stages, hypers, param, add_new_stages(stages, hypers, param, entries, name), name
        if may_begin and entries and entries.get("step") == 0:
            state = _first_state(*own, starts.get(param), layout)
        else:
            state = from_entries(*own, reinit=True, layout=layout)
        made = layout.entries(state)
        if not all(map(is_, map(entries.get, made), made.values())):
            states[param] = {**entries, **made}  # changed by the caller, or an option is on now
        elif list(entries) == list(made):
            complete.add(kind)
        found.append(state)
    return found


def _first_state(
    stages: Sequence[Stage],
    hypers: tuple[Any, ...],
    param: Tensor,
    entries: Mapping[str, Any],
    name: str,
    start: Start | None,
    layout: EntryLayout,
) -> LeafState:
    """Return the state before the first step. Arguments are those of :func:`leaf_states`.

    After the entries were created, an option may have been switched on, and the parameter may have
    got another dtype, device or shape. Entries that no longer fit are replaced.
    """
    wanted, usual = layout.dtypes, (param.shape, param.device)
    if not all(_is_like(entries.get(key), *usual, dtype) for key, dtype in wanted.items()):
        with torch.no_grad():
            made = layout.entries(init_leaf(stages, hypers, param))
        kinds = {key: (made[key].shape, made[key].device, made[key].dtype) for key in wanted}
        odd = [key for key, kind in kinds.items() if not _is_like(entries.get(key), *kind)]
        entries = {**entries, **{key: made[key] for key in odd}}
    own = stages, hypers, param, entries, name
    state = from_entries(*own, reinit=True, counted=True, layout=layout)
    is_same = start is not None and start[0] == tuple(stages)
    return reinit_state(stages, hypers, param, state, start[1] if start and is_same else None)


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
    """Check the state of every parameter of a group, and create missing state.

    If the group has a step count, it is copied to the state of each parameter.
    """
    if not stages:  # frozen parameters keep only state that was loaded
        for name, value in FROZEN_OPTIONS.items():
            group.setdefault(name, value)
        for param in group["params"]:
            if not states.get(param, True):
                del states[param]
        return
    params, count = group["params"], group.get("step")
    before = [states.get(param, {}) for param in params]
    layouts = entry_layouts(stages, hypers, params)
    bare = [k for k, entries in enumerate(before) if not entries and not count]
    with torch.no_grad():
        new = init_stages(stages, hypers, [params[k] for k in bare])
    zero = zero_count()
    at_start = tuple([GateCounts(zero, zero) for stage in stages if stage.gate is not None])
    made = {k: LeafState(zero, own, at_start) for k, own in zip(bare, new, strict=True)}
    for k, (param, entries, layout) in enumerate(zip(params, before, layouts, strict=True)):
        if k not in made:
            own = stages, hypers, param, entries, f"params[{k}]"
            made[k] = from_entries(*own, group_step=count, reinit=True, layout=layout)
    every = [made[k] for k in range(len(params))]
    columns = zip(*[(one.step, *chain.from_iterable(one.gates)) for one in every], strict=True)
    # The counts of a group are adjacent in memory, so that one call reads them all.
    counts = zip(*map(stack_counts, columns), strict=True)
    rows = zip(params, before, layouts, every, counts, strict=True)
    for param, entries, layout, state, numbers in rows:
        tensors = *numbers, *state_tensors(state.stages)
        states[param] = {**entries, **dict(zip(layout.every_key, tensors, strict=True))}


def check_complete(
    stages: Sequence[Stage],
    hypers: tuple[Any, ...],
    group: Mapping[str, Any],
    loaded: Sequence[Mapping[str, Any]],
) -> None:
    """Raise ValueError if a loaded parameter was stepped, and its state has only a step count.

    Step counts must be whole numbers. Arguments are those of :func:`restore_form`.
    """
    for k, (entries, param) in enumerate(zip(loaded, group["params"], strict=True)):
        layout = entry_layout(stages, hypers, param.shape, param.dtype)
        layout.check_complete(entries, f"params[{k}]")


def restore_form(
    stages: Sequence[Stage],
    hypers: tuple[Any, ...],
    group: Mapping[str, Any],
    loaded: Sequence[Mapping[str, Any]],
    states: States,
) -> None:
    """Restore dtypes and storages of a group's state after ``load_state_dict`` of torch.

    torch casts every field to the dtype of the parameter. If a field has its own dtype, the tensor
    in ``loaded`` is used instead. For a stored chain, state in another storage is converted.
    """
    is_stored = plain_stages(stages) != tuple(stages)
    if is_stored:
        like = [(param.shape, param.dtype) for param in group["params"]]
        forms = [
            (plain_form(stages, hypers, *one), entry_layout(stages, hypers, *one).dtypes)
            for one in like
        ]
        refuse_codes(forms, loaded)
    for k, (entries, param) in enumerate(zip(loaded, group["params"], strict=True)):
        given = {name: one.dtype for name, one in entries.items() if isinstance(one, Tensor)}
        dtypes = entry_layout(stages, hypers, param.shape, param.dtype).dtypes
        as_kept = dtypes.items() <= given.items() and dtypes.keys() >= {*find_extras(given, ())}
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


def format_checkpoint(
    chains: Sequence[tuple[Sequence[Stage], tuple[Any, ...]]],
    groups: Sequence[Mapping[str, Any]],
    state_dict: dict[str, Any],
    starts: Mapping[Tensor, Start],
) -> None:
    """Change a state dict to the form of torch.optim, and record if weight decay is decoupled.

    Stored state is decoded to float32, under torch's names. ``torch.distributed.checkpoint`` copies
    values between dtypes, so 8-bit codes would be loaded as values of any other kind of state.
    """
    written: dict[Any, Any] = dict(state_dict["state"])
    parts = zip(chains, state_dict["param_groups"], groups, strict=True)
    for (stages, hypers), kept, group in parts:
        damped = group.get("dampening", 0.0) != 0.0 and not is_called_by(_DISTRIBUTED_CHECKPOINT)
        for key, param in zip(kept["params"], group["params"], strict=True):
            if not stages:  # torch's strict loaders expect an entry for trainable parameters
                written.setdefault(key, {})
            entries = written.get(key)
            if entries:
                if not has_begun(entries):
                    layout = entry_layout(stages, hypers, param.shape, param.dtype)
                    own = f"state[{key}]", starts.get(param), layout
                    first = _first_state(stages, hypers, param, entries, *own)
                    entries = {**entries, **layout.entries(first)}
                made = checkpoint_entries(stages, hypers, param, entries, damped=damped)
                written[key] = plain_entries(stages, hypers, param, made)
    state_dict["state"] = written
    counted = with_group_steps(written, state_dict["param_groups"])
    state_dict["param_groups"] = [
        {**group, **decay_options(stages)}
        for group, (stages, _) in zip(counted, chains, strict=True)
    ]


def drop_replaced(
    groups: Sequence[Mapping[str, Any]],
    states: MutableMapping[Any, dict[str, Any]],
    starts: MutableMapping[Tensor, Start],
) -> bool:
    """Delete the initial state of parameters that are in no group any more; return True if any was.

    Tensor-parallel libraries replace parameters in ``param_groups`` before the first step. torch's
    classes have no state then, but a TorchOptimizer has its initial state. A parameter that was
    stepped and is in no group raises ValueError.
    """
    there = {id(param) for group in groups for param in group["params"]}
    replaced = [key for key in states if isinstance(key, Tensor) and id(key) not in there]
    for param in replaced:
        if has_begun(states[param]):
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} has state after "
                f"{int(states[param].get('step', 0))} steps and is in no parameter group, so a "
                "checkpoint has no place for it: move the state to the parameter that replaces it "
                "(optimizer.state[new] = optimizer.state.pop(old)), or pop it"
            )
    for param in replaced:
        del states[param]
        starts.pop(param, None)
    return bool(replaced)
