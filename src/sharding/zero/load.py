"""A state dict of torch.optim, of which each rank takes its part; it stays as it is."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.state import LeafState
from functional_optim.frontends.checkpoint_names import matched_by_name
from functional_optim.frontends.torch_arguments import EXECUTION_OPTIONS
from functional_optim.frontends.torch_checkpoint import DECOUPLED
from functional_optim.frontends.torch_groups import neutral_flags, options_of
from sharding.checkpoint.flat_ranges import elements_of, has_parts, whole_of
from sharding.zero.convert import (
    Target,
    Targets,
    gets_digits,
    give_digits,
    plain_part,
    spans_of,
    state_of,
)
from sharding.zero.local_shard import LocalShard
from sharding.zero.local_shards import LocalShards
from sharding.zero.optim import ShardOptimizer
from sharding.zero.parts import OptimizerParts
from sharding.zero.sharded_state import check_own_parts

Entries = Mapping[str, Any]


def load(parts: OptimizerParts, state_dict: Mapping[str, Any]) -> None:
    """Load this rank's part. Nothing is changed where it does not fit.

    Raises:
        ValueError: other groups or names, or a state that does not fit.
    """
    state_dict = {
        **state_dict,
        "param_groups": matched_by_name(state_dict["param_groups"], parts.groups),
    }
    groups = _new_groups(parts, state_dict)
    check_numbers(parts, state_dict["param_groups"])
    states = _states_by_path(parts, state_dict)
    check_own_parts(parts, states)
    if parts.shards is None:
        _load_foreign(parts, states)
    else:
        steps = [group.get("step") for group in state_dict["param_groups"]]
        trained = _trained(parts, states)
        with numbers_taken(parts, groups, trained):
            _load_shards(parts, parts.shards, groups, states, steps)
    for group, new in zip(parts.groups, groups, strict=True):
        group.update(options_of(new))


def check_numbers(parts: OptimizerParts, saved: Sequence[Mapping[str, Any]]) -> None:
    """Make sure that saved groups have what belongs to no parameter.

    Raises:
        ValueError: some of it is missing, or groups differ.
    """
    if isinstance(parts.optim, ShardOptimizer) and parts.optim.composed is not None:
        parts.optim.composed.check_numbers(saved)


@contextmanager
def numbers_taken(
    parts: OptimizerParts, groups: Sequence[dict[str, Any]], trained: Iterable[str]
) -> Iterator[None]:
    """Take over what belongs to no parameter from groups that are loaded, unless that fails.

    Args:
        parts: of the optimizer.
        groups: as they will be.
        trained: the paths of parameters that have a state in what is loaded.

    Raises:
        ValueError: some of it is missing, or groups differ.
    """
    composed = parts.optim.composed if isinstance(parts.optim, ShardOptimizer) else None
    before = {} if composed is None else composed.numbers()
    if composed is not None:
        composed.take_numbers(groups)
    try:
        yield
    except BaseException:
        if composed is not None:
            composed.take_numbers([before])
        raise
    if composed is not None:
        composed.were_trained(trained)


def _new_groups(parts: OptimizerParts, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups as they will be."""
    saved = state_dict["param_groups"]
    counts = [len(group["params"]) for group in parts.groups]
    saved_counts = [len(group["params"]) for group in saved]
    if counts != saved_counts:
        raise ValueError(
            f"the state dict has groups of {saved_counts} parameters, this optimizer has groups of "
            f"{counts}; they must be the same"
        )
    groups = []
    for number, one in enumerate(saved):
        options = {key: _own(value) for key, value in options_of(one).items()}
        groups.append(with_options(parts, number, options, "the state dict"))
    return groups


def with_options(
    parts: OptimizerParts, number: int, options: Mapping[str, Any], source: str
) -> dict[str, Any]:
    """A group as it will be, with options that were saved for it.

    Args:
        parts: of the optimizer.
        number: of the group.
        options: as they were saved.
        source: where, for errors.

    Raises:
        ValueError: weight decayed otherwise.
    """
    group = parts.groups[number]
    key, fixed = DECOUPLED, parts.schema_of(number).options
    taken = dict(options)
    decays = options.get("weight_decay", group.get("weight_decay"))
    if key not in group and parts.shards is not None:
        told, here = bool(taken.pop(key, fixed.get(key, False))), bool(fixed.get(key, False))
        if told != here and decays:
            raise ValueError(
                f"{source} has {'decoupled' if told else 'coupled'} weight decay ({key}={told}), "
                f"this chain has not: {parts.shards.recipes.of(number).optimizer}"
            )
    return {**group, **neutral_flags(options, group), **taken}


def check_known(parts: OptimizerParts, groups: Sequence[Mapping[str, Any]], source: str) -> None:
    """Nothing was switched on that this optimizer does not know.

    Raises:
        ValueError: names the option.
    """
    for group, new in zip(parts.groups, groups, strict=True):
        for name, value in new.items():
            if value is True and name not in group and name not in EXECUTION_OPTIONS:
                raise ValueError(
                    f"{source} has {name}=True, which this optimizer does not have; it keeps "
                    f"{', '.join(map(repr, options_of(group)))} in its groups"
                )


def _states_by_path(parts: OptimizerParts, state_dict: Mapping[str, Any]) -> dict[str, Entries]:
    """The entries of each parameter, by path."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = [param for group in parts.groups for param in group["params"]]
    paths = {id(param): path for path, param in parts.params.items()}
    by_number = {number: paths[id(param)] for number, param in zip(numbers, params, strict=True)}
    unknown = [number for number in state_dict["state"] if number not in by_number]
    if unknown:
        raise ValueError(
            f"the state dict has state for the parameter {unknown[0]!r}, which is in none of its "
            f"groups ({len(numbers)} parameters)"
        )
    return {by_number[number]: entries for number, entries in state_dict["state"].items()}


def _load_shards(
    parts: OptimizerParts,
    shards: LocalShards,
    groups: Sequence[dict[str, Any]],
    states: Mapping[str, Entries],
    steps: Sequence[Any],
) -> None:
    """Load what a rank owns; ``steps`` are the counts that groups were saved with, or None."""
    for number, group in enumerate(groups):
        shards.check_options(number, group)
    targets = Targets(shards, groups)
    read = [
        (shard, _read_part(targets.of(shard), shard, states.get(shard.path) or {}, steps))
        for shard in shards.every()
        if shard.state is not None or states.get(shard.path)
    ]
    check_known(parts, groups, "the state dict")
    digits = [
        (param, target, states[path])
        for path, param, target in targets.named(parts.params, states)
        if gets_digits(list(states[path] or ()), target, param)
    ]
    shards.remake(groups, states)
    for shard, state in read:
        if shard.state is not None:  # what is frozen has none
            shard.write(shards.chain_of(shard, groups), state)
    for param, target, entries in digits:  # all of them: each rank was given everything
        give_digits(param, target, entries)


def _trained(parts: OptimizerParts, states: Mapping[str, Entries]) -> list[str]:
    """Return the paths of parameters that have a state, or may have one: the same on all ranks.

    Of a part of a state dict, a rank sees only entries of its own; so it goes by what is trained.
    """
    whole = not has_parts(states)
    return [
        path
        for path, entries in states.items()
        if parts.params[path].requires_grad or (whole and entries)
    ]


def _read_part(
    target: Target, shard: LocalShard, entries: Entries, steps: Sequence[Any]
) -> LeafState:
    """A shard's part of a parameter's entries, in whatever storage, as it is kept here.

    Entries without a step count are at the one of their group.

    Raises:
        ValueError: they do not fit.
    """
    numel = shard.param.numel()
    given = {key: value for key, value in entries.items() if value is not None}
    spans = spans_of(target, list(given), numel, shard.start, shard.stop)
    wanted = spans_of(target, list(given), numel, 0, numel)
    for name, (_, length) in wanted.items():
        value = given[name]
        if shard.whole and name in target.plain.dtypes:
            continue  # its shape is looked at with all others
        if not isinstance(value, Tensor) or value.numel() != length:
            got = f"{value.numel()} elements" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"the state {name} of {shard.path!r} has {got}, wanted are {length}")
        if not shard.whole:
            given[name] = elements_of(value, *spans[name])
    given = {name: whole_of(value) for name, value in given.items()}
    part = plain_part(target, given, spans, shard.start, shard.stop) if given else {}
    return state_of(target, shard.tensor, part, shard.path, steps[shard.group])


def _load_foreign(parts: OptimizerParts, states: Mapping[str, Entries]) -> None:
    for one in parts.plan.owned(parts.rank):
        param = parts.params[one.path]
        entries = states.get(one.path)
        if entries:
            parts.optim.state[param] = _placed(entries, param.device)
        else:
            parts.optim.state.pop(param, None)


def _placed(value: Any, device: torch.device) -> Any:
    """A copy, on the device of a parameter; numbers in tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to(device if value.dim() else "cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _placed(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_placed(item, device) for item in value)
    return value


def _own(value: Any) -> Any:
    """An option that shares no memory with the caller's."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value
