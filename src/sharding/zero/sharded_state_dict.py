"""State dict of one rank's part, for ``torch.distributed.checkpoint``."""

from collections.abc import Mapping, Sequence
from typing import Any

from sharding.checkpoint.flat_ranges import FlatRanges, OnOtherRanks, check_origin
from sharding.transport.groups import GroupRank, format_ranks
from sharding.zero.params import indices_of
from sharding.zero.range_step_mixin import RangeStepMixin
from sharding.zero.state_layout import StateLayouts, with_class_step


def sharded_states(zero: RangeStepMixin) -> dict[int, dict[str, Any]]:
    """Return this rank's part of the state, by the number of the parameter. Not collective.

    Names and values are those of torch.optim: state in other storages is decoded to float32. All
    fields are there at any step, since loading writes only to existing entries. State that is not
    per element, such as a step count, is in the part of every owner.
    """
    numbers, shards = indices_of(zero.param_groups), zero.shards
    assert shards is not None, "checked by state_dict()"
    layouts, origin = StateLayouts(shards, zero.param_groups), _origin(zero)
    found: dict[int, dict[str, Any]] = {}
    for shard, layout, entries in layouts.plain_entries():
        own = found.setdefault(numbers[id(shard.param)], {})
        for name, value in with_class_step(entries, shards.chains.recipe.form).items():
            shape, start = layout.place_of(shard, name, value)
            ranges = {**own[name].ranges} if name in own else {}
            ranges[start] = value.detach().reshape(-1)
            own[name] = FlatRanges(shape, ranges, value.dtype, value.device, origin)
    for param in zero.params.values():
        if param.requires_grad:
            found.setdefault(numbers[id(param)], OnOtherRanks(origin))
    return dict(sorted(found.items()))


def _origin(zero: RangeStepMixin) -> str:
    """Return an identifier of this rank's part: equal only for the same rank of an equal plan."""
    return f"rank {zero.rank} of plan {zero.plan.digest[:16]}"


def check_own_parts(zero: RangeStepMixin, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError for parts of states of another plan or rank. All ranks decide the same."""
    own = "of a class whose state has no known form" if zero.shards is None else _origin(zero)
    check_origin(states, own, format_ranks(zero.process_group, [GroupRank(zero.rank)]))


def sharded_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups of a state dict, as ``torch.distributed.checkpoint`` matches them.

    It loads only keys that both sides have, and matches parameters by itself. So the result has no
    names, which an optimizer may lack; no schedules, which are functions; and no step counts of
    groups, which no rank knows alone.
    """
    return [
        {
            key: value
            for key, value in group.items()
            if key not in ("param_names", "step") and not _is_schedule(value)
        }
        for group in groups
    ]


def _is_schedule(value: Any) -> bool:
    return any(map(callable, value if isinstance(value, (tuple, list)) else [value]))
