"""State dict of one rank's part, for ``torch.distributed.checkpoint``: no rank has it whole."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from functional_optim.storage.plain import decoded, parts_of
from sharding.checkpoint.flat_ranges import FlatRanges, OnOtherRanks, check_origin
from sharding.transport.peers import GroupRank, named
from sharding.zero.convert import Target, Targets, with_class_step
from sharding.zero.local_shard import LocalShard
from sharding.zero.params import indices_of
from sharding.zero.parts import OptimizerParts

_Place = tuple[tuple[int, ...], int]
"""Shape of a state tensor for all of its parameter, and where a shard begins in it."""


def sharded_states(parts: OptimizerParts) -> dict[int, dict[str, Any]]:
    """Return this rank's part of the state, by the number of the parameter. Not collective.

    Names and values are those of torch.optim: state in other storages is decoded to float32. All
    fields are there at any step, since loading writes only to what it finds. A number of a leaf,
    such as its step count, is with every owner of a part of the parameter.

    Raises:
        RuntimeError: a class of which nothing is known.
    """
    numbers, shards = indices_of(parts.groups), parts.known_shards
    targets, origin = Targets(shards, parts.groups), _origin(parts)
    found: dict[int, dict[str, Any]] = {}
    for shard, entries in parts.with_state():
        own = found.setdefault(numbers[id(shard.param)], {})
        for name, (shape, start), value in _plain(parts, shard, entries, targets.of(shard)):
            ranges = {**own[name].ranges} if name in own else {}
            ranges[start] = value.detach().reshape(-1)
            own[name] = FlatRanges(shape, ranges, value.dtype, value.device, origin)
    for param in parts.params.values():
        if param.requires_grad:
            found.setdefault(numbers[id(param)], OnOtherRanks(origin))
    return dict(sorted(found.items()))


def _plain(
    parts: OptimizerParts, shard: LocalShard, entries: Mapping[str, Tensor], target: Target
) -> Iterator[tuple[str, _Place, Tensor]]:
    """Yield (name, place, value) of a shard's entries as the class writes them."""
    chain = parts.known_shards.chain_of(shard, parts.groups)
    places = {name: shard.place_of(chain, name, value) for name, value in entries.items()}
    if target.plain.stored:
        fields = target.plain.dtypes
        kept = parts_of(fields, entries)
        places.update({field: places[one.values] for field, one in kept.items()})
        entries = decoded(entries, fields)
    rest = {name: value for name, value in entries.items() if name != "step"}
    for name, value in with_class_step(rest, entries, parts.schema).items():
        yield name, places[name], value


def _origin(parts: OptimizerParts) -> str:
    """Return whose part this rank's is: equal only for the same rank of an equal plan."""
    return f"rank {parts.rank} of plan {parts.plan.digest[:16]}"


def check_own_parts(parts: OptimizerParts, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Make sure that parts of states are of this rank. All ranks find out alike, and by themselves.

    Raises:
        ValueError: they are of another plan or another rank; names the first parameter.
    """
    own = "of a class whose state has no known form" if parts.shards is None else _origin(parts)
    check_origin(states, own, named(parts.process_group, [GroupRank(parts.rank)]))


def sharded_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups of a state dict as ``torch.distributed.checkpoint`` matches them.

    It loads only keys that both sides have, and identifies parameters by itself. So names are left
    out, which optimizers may or may not have, and so are schedules, which are functions, and step
    counts of groups, which no rank knows alone.
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
