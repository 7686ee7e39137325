"""Loading of a torch.optim state dict into a ZeroRedundancyOptimizer: each rank loads its part."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from functional_optim import LeafState
from functional_optim.engine.options import missing_flags, options_of
from functional_optim.engine.recipes import EXECUTION_OPTIONS
from functional_optim.engine.states import entry_layout, match_params, own_copy
from functional_optim.storage.conversion import decode_entries, encode_entries
from sharding.checkpoint.flat_ranges import elements_of, has_parts, whole_of
from sharding.zero.local_shard import LocalShard
from sharding.zero.local_shards import LocalShards
from sharding.zero.range_step_mixin import RangeStepMixin
from sharding.zero.shard_optimizer import ShardOptimizer
from sharding.zero.sharded_state_dict import check_own_parts
from sharding.zero.state_layout import (
    StateLayout,
    StateLayouts,
    needs_extra_digits,
    write_extra_digits,
)

Entries = Mapping[str, Any]


def load(zero: RangeStepMixin, state_dict: Mapping[str, Any]) -> None:
    """Load this rank's part of a state dict. If that raises, nothing has changed."""
    saved = match_params(state_dict, zero.param_groups)
    state_dict = {**state_dict, "param_groups": saved}
    groups = _loaded_groups(zero, saved)
    steps = zero.optim if isinstance(zero.optim, ShardOptimizer) else None
    if steps is not None:
        steps.owned.chains.check_shared(state_dict["param_groups"])
    states = _states_by_path(zero, state_dict)
    check_own_parts(zero, states)
    if steps is None:
        _load_foreign(zero, states)
    else:
        counts = [group.get("step") for group in state_dict["param_groups"]]
        trained = _trained_paths(zero, states)
        with _shared_scalars_loaded(steps, groups, trained):
            _load_shards(zero, steps.owned, groups, states, counts)
    for group, new in zip(zero.param_groups, groups, strict=True):
        group.update(options_of(new))


@contextmanager
def _shared_scalars_loaded(
    steps: ShardOptimizer, groups: Sequence[dict[str, Any]], trained: Iterable[str]
) -> Iterator[None]:
    """Load shared scalars, if there are any, from groups, unless the block raises an error.

    ``trained`` are the paths of parameters that have a state in the state dict.
    """
    before = steps.owned.chains.shared_entries()
    steps.load_shared(groups)
    try:
        yield
    except BaseException:
        steps.load_shared([before])
        raise
    steps.mark_trained(trained)


def _loaded_groups(
    zero: RangeStepMixin, saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the parameter groups with saved options; options that are missing keep their values.

    Raise ValueError if the saved groups are others, or decay weights in another way.
    """
    counts = [len(group["params"]) for group in zero.param_groups]
    saved_counts = [len(group["params"]) for group in saved]
    if counts != saved_counts:
        raise ValueError(
            f"the state dict has groups of {saved_counts} parameters, this optimizer has groups of "
            f"{counts}; give the optimizer the groups that it had when the state was saved"
        )
    own = zero.param_groups
    options = [own_copy(options_of(one)) for one in saved]
    if zero.shards is None:
        pairs = zip(options, own, strict=True)
        return [{**group, **missing_flags(one, group), **one} for one, group in pairs]
    chains, recipe = zero.shards.chains, zero.shards.chains.recipe
    loaded = zip(chains.parts, own, recipe.loaded_groups(options, own), strict=True)
    return [
        recipe.loaded_group(part.optimizer.stages, {**group, **one}) for part, group, one in loaded
    ]


def _check_flags(zero: RangeStepMixin, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for an option of new groups that is True, and unknown to this optimizer."""
    for group, new in zip(zero.param_groups, groups, strict=True):
        for name, value in new.items():
            if value is True and name not in group and name not in EXECUTION_OPTIONS:
                raise ValueError(
                    f"the state dict has {name}=True, which this optimizer does not have; it keeps "
                    f"{', '.join(map(repr, options_of(group)))} in its groups"
                )


def _states_by_path(zero: RangeStepMixin, state_dict: Mapping[str, Any]) -> dict[str, Entries]:
    """Return the entries of each parameter, by path."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = [param for group in zero.param_groups for param in group["params"]]
    paths = {id(param): path for path, param in zero.params.items()}
    by_number = {number: paths[id(param)] for number, param in zip(numbers, params, strict=True)}
    unknown = [number for number in state_dict["state"] if number not in by_number]
    if unknown:
        raise ValueError(
            f"the state dict has state under {unknown[0]!r}, which is no parameter of its groups, "
            "and this optimizer keeps state of parameters only; remove it, and save it elsewhere"
        )
    return {by_number[number]: entries for number, entries in state_dict["state"].items()}


def _load_shards(
    zero: RangeStepMixin,
    shards: LocalShards,
    groups: Sequence[dict[str, Any]],
    states: Mapping[str, Entries],
    counts: Sequence[Any],
) -> None:
    """Load this rank's shards; ``counts`` has the step count of each saved group, or None."""
    for number, group in enumerate(groups):
        shards.check_options(number, group)
    layouts = StateLayouts(shards, groups)
    read = [
        (shard, _read_part(layouts.of(shard), shard, states.get(shard.path) or {}, counts))
        for shard in shards.every()
        if shards.has_state(shard) or states.get(shard.path)
    ]
    _check_flags(zero, groups)
    digits = [
        (param, layout, states[path])
        for path, param, layout in layouts.named(zero.params, states)
        if needs_extra_digits(list(states[path] or ()), layout, param)
    ]
    shards.load(groups, read, states)
    for param, layout, entries in digits:  # each rank has all entries
        write_extra_digits(param, layout, entries)


def _trained_paths(zero: RangeStepMixin, states: Mapping[str, Entries]) -> list[str]:
    """Return the paths of parameters that have a state, or may have one: the same on all ranks.

    In a part of a state dict, a rank sees only its own entries. Then trained parameters count.
    """
    whole = not has_parts(states)
    return [
        path
        for path, entries in states.items()
        if zero.params[path].requires_grad or (whole and entries)
    ]


def _read_part(
    layout: StateLayout, shard: LocalShard, entries: Entries, counts: Sequence[Any]
) -> LeafState:
    """Return a shard's part of a parameter's entries, from any storage, as this chain stores it.

    Entries without a step count have the step count of their group.
    """
    given = {key: value for key, value in entries.items() if value is not None}
    plain = decode_entries(given, layout.plain.dtypes)
    part = {name: _cut(layout, shard, name, value) for name, value in plain.items()}
    chain, count = layout.chain, counts[shard.group]
    own = chain.stages, chain.hypers, shard.tensor
    like = shard.tensor.shape, shard.tensor.dtype
    entry_layout(chain.stages, chain.hypers, *like).check_complete(part, shard.path)
    return encode_entries(*own, part, shard.path, group_step=count)


def _cut(layout: StateLayout, shard: LocalShard, name: str, value: Any) -> Any:
    """Return the part of a parameter's plain entry that belongs to a shard."""
    wanted = layout.span_of(name, 0, shard.param.numel())
    if wanted is None or (shard.whole and name in layout.plain.dtypes):
        return whole_of(value)  # encode_entries checks the shape
    if not isinstance(value, Tensor) or value.numel() != wanted[1]:
        got = f"{value.numel()} elements" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"the state {name} of {shard.path!r} has {got}, wanted are {wanted[1]}")
    span = layout.span_of(name, shard.start, shard.stop)
    return whole_of(value) if shard.whole or span is None else elements_of(value, *span)


def _load_foreign(zero: RangeStepMixin, states: Mapping[str, Entries]) -> None:
    for one in zero.plan.owned(zero.rank):
        param = zero.params[one.path]
        entries = states.get(one.path)
        if entries:
            zero.optim.state[param] = _copy_to_device(entries, param.device)
        else:
            zero.optim.state.pop(param, None)


def _copy_to_device(value: Any, device: torch.device) -> Any:
    """Return a copy on the device of a parameter; 0-d tensors are copied to the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to(device if value.dim() else "cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copy_to_device(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy_to_device(item, device) for item in value)
    return value
