"""State from another storage: what of it a range of elements needs, decoded and encoded again."""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.stage import block_size_of
from functional_optim.core.state import LeafState
from functional_optim.core.torch_state import starts_in_first_step
from functional_optim.frontends.recipe import GroupChain, StateDictForm
from functional_optim.frontends.torch_checkpoint import torch_step
from functional_optim.storage.param_storage import value_of
from functional_optim.storage.plain import (
    FieldTensors,
    PlainForm,
    decoded,
    encoded,
    extras_in,
    parts_of,
    plain_form,
)
from functional_optim.storage.state_storage import BLOCK
from sharding.zero.local_shard import FieldKind, LocalShard, kinds_of
from sharding.zero.local_shards import LocalShards
from sharding.zero.params import Groups

Span = tuple[int, int]
"""Elements [begin, end) of a tensor laid flat."""


class Target(NamedTuple):
    """State of a parameter, whatever keeps it."""

    chain: GroupChain
    plain: PlainForm
    kinds: Mapping[str, FieldKind]
    """Of the plain fields; nothing for a chain that needs its parameter whole."""
    block_size: int
    """Elements that a field of the kind "block" has one entry for."""

    def starts_late(self, param: Tensor) -> bool:
        """Return True if torch makes all state of such a parameter in its first step."""
        plain = self.plain
        like = param.detach().new_empty(0, dtype=torch.float32) if plain.stored else param
        return starts_in_first_step(plain.stages, plain.hypers, like)


class Targets:
    """The target of each shard; those of one group and shape are made once.

    Args:
        shards: what a rank owns.
        groups: the parameter groups, with the options that state is to be made for.
    """

    def __init__(self, shards: LocalShards, groups: Groups) -> None:
        self._shards = shards
        self._groups = groups
        self._known: dict[Any, Target] = {}

    def of(self, shard: LocalShard) -> Target:
        """The target of a shard."""
        return self.at(shard.group, shard.tensor)

    def at(self, number: int, param: Tensor) -> Target:
        """The target of a parameter of a group, whoever owns it."""
        kind = (number, param.shape, param.dtype, param.device)
        if kind not in self._known:
            chain = self._shards.chain_for(number, self._groups[number], param.device.type)
            self._known[kind] = _target(chain, param)
        return self._known[kind]

    def named(
        self, params: Mapping[str, Tensor], wanted: Container[str]
    ) -> Iterator[tuple[str, Tensor, Target]]:
        """(path, parameter, target) of the paths that are wanted, whoever owns them."""
        paths = {id(param): path for path, param in params.items()}
        for number, group in enumerate(self._groups):
            for param in group["params"]:
                if paths[id(param)] in wanted:
                    yield paths[id(param)], param, self.at(number, param)


def _target(chain: GroupChain, key: Tensor) -> Target:
    form = plain_form(chain.stages, chain.hypers, key.shape, key.dtype)
    like = key.detach().new_empty(0, dtype=torch.float32) if form.stored else key
    kinds = kinds_of(chain._replace(stages=form.stages, hypers=form.hypers), like)
    return Target(chain, form, kinds, block_size_of(form.stages))


def spans_of(
    target: Target, names: Sequence[str], numel: int, start: int, stop: int
) -> dict[str, Span]:
    """Return the spans of saved tensors that elements [start, stop) of a parameter need.

    What was kept in blocks is needed block by block. A tensor that is not named here is one for the
    whole parameter.

    Args:
        target: what the state is.
        names: of the tensors.
        numel: elements of the parameter.
        start: the first.
        stop: one past the last.
    """
    fields = target.plain.dtypes
    found = dict.fromkeys(extras_in(names, fields), (start, stop))
    for field, parts in parts_of(fields, names).items():
        kind = target.kinds.get(field, "leaf")
        if kind == "block":
            found[parts.values] = (start // target.block_size, -(-stop // target.block_size))
        elif kind == "element":
            found |= _of_elements(parts, numel, start, stop)
    return found


def _of_elements(parts: FieldTensors, numel: int, start: int, stop: int) -> dict[str, Span]:
    if parts.scale is None:
        return {parts.values: (start, stop)}
    first, last = start // BLOCK, -(-stop // BLOCK)
    return {parts.values: (first * BLOCK, min(last * BLOCK, numel)), parts.scale: (first, last)}


def plain_part(
    target: Target, entries: Mapping[str, Any], spans: Mapping[str, Span], start: int, stop: int
) -> dict[str, Any]:
    """The plain entries of elements [start, stop), from the spans that they need."""
    fields = target.plain.dtypes
    found = decoded(entries, fields)
    for field, (values, scale) in parts_of(fields, entries).items():
        if scale is not None and values in spans and found[field].numel() != stop - start:
            begin = spans[values][0]
            found[field] = found[field].reshape(-1)[start - begin : stop - begin]
    return found


def state_of(
    target: Target, param: Tensor, entries: Mapping[str, Any], path: str, group_step: Any = None
) -> LeafState:
    """The state that a chain keeps, from plain entries."""
    chain = target.chain
    return encoded(chain.stages, chain.hypers, param, entries, path, group_step=group_step)


def gets_digits(names: Sequence[str], target: Target, param: Tensor) -> bool:
    """Return True if a parameter is to have the digits that another storage kept beside it."""
    wide = param.is_floating_point() and param.dtype.itemsize >= torch.float32.itemsize
    return wide and not target.plain.extras and bool(extras_in(names, target.plain.dtypes))


def give_digits(param: Tensor, target: Target, entries: Mapping[str, Any]) -> None:
    """Write them, in place."""
    names = extras_in(list(entries), target.plain.dtypes)
    with torch.no_grad():
        param.copy_(value_of(param, {name: entries[name] for name in names}))


def as_class_writes(
    entries: Mapping[str, Tensor],
    schema: StateDictForm,
    fields: Collection[str],
    *,
    starts_late: bool,
) -> dict[str, Tensor]:
    """Plain entries of a parameter as the class meant writes them; none where it writes none.

    Args:
        entries: "step" and all others.
        schema: of the class.
        fields: those that are state, and nothing that a storage keeps of the parameter.
        starts_late: as :meth:`Target.starts_late` says.
    """
    begins = int(entries["step"]) == 0
    if begins and not schema.eager:
        return {}
    # torch would take a buffer of zeros for one of a later step.
    left_out = {"step", *(fields if begins and starts_late else ())}
    return with_class_step(
        {key: value for key, value in entries.items() if key not in left_out}, entries, schema
    )


def with_class_step(
    rest: Mapping[str, Tensor], entries: Mapping[str, Tensor], schema: StateDictForm
) -> dict[str, Tensor]:
    """Return entries with the step count as the class writes it, or without one.

    Args:
        rest: the entries except for "step".
        entries: that have "step".
        schema: of the class.
    """
    return {"step": torch_step(entries["step"]), **rest} if schema.counts_steps else dict(rest)
