"""State dict of one rank's part, for ``torch.distributed.checkpoint``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from functional_optim.frontends.recipe import StateDictForm
from functional_optim.storage.conversion import find_field_tensors
from sharding.checkpoint.flat_ranges import FlatRanges, OnOtherRanks, check_origin
from sharding.transport.groups import GroupRank, format_ranks
from sharding.zero.local_shard import LocalShard
from sharding.zero.params import indices_of
from sharding.zero.range_step_mixin import RangeStepMixin
from sharding.zero.state_layout import StateLayout, StateLayouts, with_class_step

_Place = tuple[tuple[int, ...], int]
"""The shape of a state tensor for its whole parameter, and the offset of a shard in it."""


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
    for shard, entries in shards.iter_entries(zero.param_groups):
        own = found.setdefault(numbers[id(shard.param)], {})
        written = _class_entries(shards.recipe.form, shard, entries, layouts.of(shard))
        for name, (shape, start), value in written:
            ranges = {**own[name].ranges} if name in own else {}
            ranges[start] = value.detach().reshape(-1)
            own[name] = FlatRanges(shape, ranges, value.dtype, value.device, origin)
    for param in zero.params.values():
        if param.requires_grad:
            found.setdefault(numbers[id(param)], OnOtherRanks(origin))
    return dict(sorted(found.items()))


def _class_entries(
    form: StateDictForm, shard: LocalShard, entries: Mapping[str, Tensor], layout: StateLayout
) -> Iterator[tuple[str, _Place, Tensor]]:
    """Yield (name, place, value) of a shard's entries, as the class writes them."""
    places = {name: shard.position_of(layout.chain, name, value) for name, value in entries.items()}
    if layout.plain.stored:
        kept = find_field_tensors(layout.plain.dtypes, entries)
        places.update({field: places[one.values] for field, one in kept.items()})
        entries = layout.plain.entries_of(entries)
    rest = {name: value for name, value in entries.items() if name != "step"}
    for name, value in with_class_step(rest, entries, form).items():
        yield name, places[name], value


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
