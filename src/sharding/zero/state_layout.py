"""Layout of the state of a parameter, and conversion of state dicts to it."""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from functional_optim.engine.recipes import GroupChain, StateDictForm
from functional_optim.engine.stages import block_size_of
from functional_optim.engine.states import init_leaf, starts_in_first_step, to_entries, torch_step
from functional_optim.storage.conversion import (
    PlainForm,
    find_extras,
    plain_form,
)
from functional_optim.storage.param_storage import value_of
from sharding.transport import Range
from sharding.zero.local_shard import LocalShard
from sharding.zero.local_shards import LocalShards
from sharding.zero.params import Groups

FieldKind = Literal["element", "block", "leaf"]
"""A state tensor has an entry for each element, or for each block, or has any other shape."""


class StateLayout(NamedTuple):
    """Layout of the state of a parameter, in torch-like entries and in a storage."""

    chain: GroupChain
    plain: PlainForm
    kinds: Mapping[str, FieldKind]
    """The kind of each plain field; empty if the chain needs whole parameters."""
    block_size: int
    """Number of elements for which a field of the kind "block" has one entry."""
    starts_late: bool
    """True if torch creates all state of this parameter in its first step."""

    def place_of(self, shard: LocalShard, name: str, tensor: Tensor) -> tuple[tuple[int, ...], int]:
        """Return the shape of a whole parameter's plain entry, and the shard's offset in it."""
        span = self.span_of(name, shard.start, shard.param.numel())
        if shard.whole or span is None:
            return tuple(tensor.shape), 0
        return tuple(shard.param.shape) if self._kind_of(name) == "element" else span[1:], span[0]

    def span_of(self, name: str, start: int, stop: int) -> Range | None:
        """Return the span of a plain entry that elements [start, stop) of a parameter need.

        None for an entry that belongs to the whole parameter.
        """
        kind = self._kind_of(name)
        if kind == "block":
            return start // self.block_size, -(-stop // self.block_size)
        return (start, stop) if kind == "element" else None

    def _kind_of(self, name: str) -> FieldKind:
        is_extra = bool(find_extras([name], self.plain.dtypes))
        return "element" if is_extra else self.kinds.get(name, "leaf")


class StateLayouts:
    """State layouts of the shards of a rank, one for each group, shape, dtype and device."""

    def __init__(self, shards: LocalShards, groups: Groups) -> None:
        self._shards = shards
        self._groups = groups
        self._known: dict[Any, StateLayout] = {}

    def of(self, shard: LocalShard) -> StateLayout:
        """Return the layout of the state of a shard."""
        return self.at(shard.group, shard.tensor)

    def at(self, number: int, param: Tensor) -> StateLayout:
        """Return the layout of the state of a parameter of a group, whichever rank owns it."""
        kind = (number, param.shape, param.dtype, param.device)
        if kind not in self._known:
            chain = self._shards.chains.reader(number).chain(self._groups[number])
            self._known[kind] = _layout(chain, param)
        return self._known[kind]

    def plain_entries(self) -> Iterator[tuple[LocalShard, StateLayout, dict[str, Tensor]]]:
        """Yield every shard that has state, its layout, and its entries, with "step"."""
        self._shards.complete(self._groups)
        shards = list(self._shards.with_state())
        states = self._shards.states_of(shards, self._groups)
        for shard, state in zip(shards, states, strict=True):
            layout = self.of(shard)
            chain = self._shards.chain_of(shard, self._groups)
            entries = to_entries(chain.stages, chain.hypers, shard.tensor, state)
            yield shard, layout, layout.plain.entries_of(entries)

    def named(
        self, params: Mapping[str, Tensor], wanted: Container[str]
    ) -> Iterator[tuple[str, Tensor, StateLayout]]:
        """Yield (path, parameter, layout) for the wanted paths, whichever rank owns them."""
        paths = {id(param): path for path, param in params.items()}
        for number, group in enumerate(self._groups):
            for param in group["params"]:
                if paths[id(param)] in wanted:
                    yield paths[id(param)], param, self.at(number, param)


def _field_kinds(chain: GroupChain, like: Tensor) -> dict[str, FieldKind]:
    """Return the kind of each state tensor of a chain, by torch's name for the tensor.

    The state of three blocks shows the kinds. Empty for a chain that needs whole parameters.
    """
    if any(stage.kind != "pointwise" for stage in chain.stages):
        return {}
    block = block_size_of(chain.stages)
    with torch.no_grad():
        probe = like.detach().new_zeros(3 * block)
        state = init_leaf(chain.stages, chain.hypers, probe)
        entries = to_entries(chain.stages, chain.hypers, probe, state)
    return {name: _kind(tensor, block) for name, tensor in entries.items()}


def _kind(tensor: Tensor, block: int) -> FieldKind:
    if tensor.shape == (3 * block,):
        return "element"
    return "block" if tensor.shape == (3,) else "leaf"


def _layout(chain: GroupChain, key: Tensor) -> StateLayout:
    form = plain_form(chain.stages, chain.hypers, key.shape, key.dtype)
    like = key.detach().new_empty(0, dtype=torch.float32) if form.stored else key
    kinds = _field_kinds(chain._replace(stages=form.stages, hypers=form.hypers), like)
    late = starts_in_first_step(form.stages, form.hypers, like)
    return StateLayout(chain, form, kinds, block_size_of(form.stages), late)


def needs_extra_digits(names: Sequence[str], layout: StateLayout, param: Tensor) -> bool:
    """Return True if saved state has extra digits of a parameter, and the parameter can hold them.

    A storage keeps extra digits of a bfloat16 parameter. A float32 parameter holds them itself.
    """
    wide = param.is_floating_point() and param.dtype.itemsize >= torch.float32.itemsize
    return wide and not layout.plain.extras and bool(find_extras(names, layout.plain.dtypes))


def write_extra_digits(param: Tensor, layout: StateLayout, entries: Mapping[str, Any]) -> None:
    """Write a parameter with the extra digits of saved state, in place."""
    names = find_extras(list(entries), layout.plain.dtypes)
    with torch.no_grad():
        param.copy_(value_of(param, {name: entries[name] for name in names}))


def to_class_entries(
    entries: Mapping[str, Tensor],
    schema: StateDictForm,
    fields: Collection[str],
    *,
    starts_late: bool,
) -> dict[str, Tensor]:
    """Return the entries of a parameter as the imitated class writes them; empty if it has none.

    Args:
        entries: plain entries, with "step".
        schema: of the class.
        fields: names of the entries that are state, not extra digits of the parameter.
        starts_late: True if torch creates all state of this parameter in its first step.
    """
    begins = int(entries["step"]) == 0
    if begins and not schema.eager:
        return {}
    # torch would treat a buffer of zeros as the buffer of a later step.
    left_out = [*fields] if begins and starts_late else []
    kept = {key: value for key, value in entries.items() if key not in left_out}
    return with_class_step(kept, schema)


def with_class_step(entries: Mapping[str, Tensor], schema: StateDictForm) -> dict[str, Tensor]:
    """Return entries with the step count as a class writes it, if it counts for each parameter."""
    rest = {key: value for key, value in entries.items() if key != "step"}
    return {"step": torch_step(entries["step"]), **rest} if schema.counts_steps else rest
