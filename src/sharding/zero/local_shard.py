"""A local shard: what this rank owns of one parameter, and the state of that."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from functional_optim.core.first_state import with_first_values
from functional_optim.core.initial import init_leaf
from functional_optim.core.stage import block_size_of, in_full_blocks
from functional_optim.core.state import LeafState, map_state
from functional_optim.core.torch_state import from_entries, kept_dtypes, to_entries
from functional_optim.frontends.recipe import GroupChain
from functional_optim.optimizer.bound_buffer import copy_states, keeps_flat_state
from functional_optim.plan.step_counts import is_count

AT_ONCE = 1 << 18
"""Elements of which state is made at once: what is encoded is made in float32 first."""

FieldKind = Literal["element", "block", "leaf"]
"""Whether a state tensor has an entry for each element, for each block, or any for the leaf."""


@dataclass(slots=True, eq=False)
class LocalShard:
    """Elements [start, stop) of a parameter, which this rank owns: a leaf of the engine."""

    path: str
    start: int
    stop: int
    whole: bool
    group: int
    """The number of its parameter group."""
    param: Tensor
    tensor: Tensor
    """What stands for it in ``.optim``: the parameter itself, or a view of the range."""
    state: dict[str, Any] | None = None
    """Its entry in ``.optim.state``; None while it has never been trainable."""
    _kinds: dict[str, FieldKind] | None = field(default=None, repr=False)
    _made_for: tuple[Any, ...] | None = field(default=None, repr=False)
    """The hyper-parameters for which its state was made."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def trainable(self) -> bool:
        """Return True if its parameter is, now."""
        return self.param.requires_grad

    @property
    def wants_state(self) -> bool:
        """Return True if it is, or was, to be stepped."""
        return self.trainable or self.param.grad is not None

    @property
    def device(self) -> str:
        """The type of device that it is on."""
        return self.tensor.device.type

    def begin(self, chain: GroupChain) -> None:
        """Make its state, as it is before the first step."""
        self._kinds, self._made_for = None, chain.hypers
        with torch.no_grad():
            if self._is_made_at_once(chain):
                made = init_leaf(chain.stages, chain.hypers, self.tensor.detach())
                self.state = to_entries(chain.stages, chain.hypers, self.tensor, made)
            else:
                self.state = self._allocated(chain)
                self._fill(chain)

    def begin_anew(self, chain: GroupChain) -> None:
        """Before the first step, what starts as the parameter starts as it is now.

        A caller may have written to the parameter, as one does who loads a model. All else is as it
        stands, since a caller may have written to it.
        """
        entries = self.state
        assert entries is not None, "completed before"
        if entries and entries.get("step") != 0:
            return
        with torch.no_grad():
            if not entries or self.lacking(chain):
                made = init_leaf(chain.stages, chain.hypers, self.tensor.detach())
                new = to_entries(chain.stages, chain.hypers, self.tensor, made)
                entries.update({key: one for key, one in new.items() if entries.get(key) is None})
            if self._is_made_at_once(chain):
                self._renew(chain, self.tensor.detach(), self.state_for(chain))
            else:
                for start, stop in self._stretches(chain):
                    self._renew(chain, *self.part(chain, start, stop))

    def _renew(self, chain: GroupChain, param: Tensor, state: LeafState) -> None:
        """Write what starts as the parameter into a state that has made no step."""
        new = with_first_values(chain.stages, chain.hypers, param, state, self._made_for)
        if new is not state:
            copy_states([state], [new])

    def _stretches(self, chain: GroupChain) -> Iterator[tuple[int, int]]:
        """Yield the ranges of elements of which state is made at once."""
        many = in_full_blocks(AT_ONCE, block_size_of(chain.stages))
        for start in range(self.start, self.stop, many):
            yield start, min(start + many, self.stop)

    def _is_made_at_once(self, chain: GroupChain) -> bool:
        return self.numel <= AT_ONCE or not self.can_be_cut(chain)

    def _fill(self, chain: GroupChain) -> None:
        """Write the state before the first step, part by part."""
        for start, stop in self._stretches(chain):
            param, into = self.part(chain, start, stop)
            copy_states([into], [init_leaf(chain.stages, chain.hypers, param)])

    def can_be_cut(self, chain: GroupChain) -> bool:
        """Return True if the elements of its state lie in the order of the parameter's shape."""
        tensor = self.tensor
        if tensor.is_complex() or not tensor.is_contiguous():
            return False
        return keeps_flat_state(chain.stages, chain.hypers, [tensor.shape], tensor.dtype)

    def _allocated(self, chain: GroupChain) -> dict[str, Any]:
        """State without values; that of three blocks shows which tensors have one for each."""
        block, like = block_size_of(chain.stages), self.tensor.detach()

        def allocated(one: Tensor) -> Tensor:
            shape = like.shape if one.numel() == 3 * block else (-(-self.numel // block),)
            return like.new_empty(shape, dtype=one.dtype, device=one.device)

        shown = init_leaf(chain.stages, chain.hypers, like.new_zeros(3 * block))
        made = shown._replace(stages=tuple(map_state(allocated, one) for one in shown.stages))
        return to_entries(chain.stages, chain.hypers, like, made)

    def lacking(self, chain: GroupChain) -> list[str]:
        """Return the entries that a chain of now needs, and that its state does not have."""
        wanted = kept_dtypes(chain.stages, chain.hypers, self.tensor.shape, self.tensor.dtype)
        return [] if self.state is None else [name for name in wanted if name not in self.state]

    def state_for(self, chain: GroupChain) -> LeafState:
        """Its state as a chain of now has it: the very tensors of its entries.

        Entries that a chain of now does not have are left behind, as in torch; those that an option
        has turned on are made, where nothing else is there.

        Raises:
            ValueError: an entry is missing, or does not fit.
        """
        entries = self.state
        assert entries is not None, "completed before"
        lacking = self.lacking(chain)
        if lacking and any(
            isinstance(one, Tensor) and not is_count(one) for one in entries.values()
        ):
            raise ValueError(
                f"an option now needs {', '.join(lacking)}, which was not made, at {self.path!r}: "
                "set that option when the optimizer is constructed, or load a state dict that has "
                "it"
            )
        count = entries.get("step")
        if is_count(count):  # counted here, so that values before the first step need no look
            known = {**entries, "step": 1}
            made = self.read(chain, known)
            state = made._replace(step=count) if int(made.step) else made
        else:
            state = self.read(chain, entries)
        made_entries = to_entries(chain.stages, chain.hypers, self.tensor, state)
        if any(entries.get(name) is not value for name, value in made_entries.items()):
            entries.update(made_entries)  # changed by hand, or an option turned on
        return state

    def entries(self, chain: GroupChain) -> dict[str, Tensor]:
        """Its state as torch.optim has it, "step" first: the very tensors."""
        return to_entries(chain.stages, chain.hypers, self.tensor, self.state_for(chain))

    def read(self, chain: GroupChain, entries: Mapping[str, Any]) -> LeafState:
        """The state in torch-like entries of its own shape, checked.

        Raises:
            ValueError: they do not fit.
        """
        return from_entries(
            chain.stages, chain.hypers, self.tensor, entries, self.path, begins_anew=True
        )

    def write(self, chain: GroupChain, state: LeafState) -> None:
        """Copy the values of a state of its shape into its own."""
        copy_states([self.state_for(chain)], [state])

    def part(self, chain: GroupChain, start: int, stop: int) -> tuple[Tensor, LeafState]:
        """The parameter's elements [start, stop), all in this shard, and their state, laid flat.

        Args:
            chain: whose state can be cut.
            start: as the shard's own, counted in the parameter; where a block begins.
            stop: likewise; where a block ends, or the shard.
        """
        begin, end, block = start - self.start, stop - self.start, block_size_of(chain.stages)

        def view(tensor: Tensor) -> Tensor:
            flat = tensor.view(-1)
            per_block = tensor.numel() != self.numel
            return flat[begin // block : -(-end // block)] if per_block else flat[begin:end]

        state = self.state_for(chain)
        stages = tuple(map_state(view, one) for one in state.stages)
        return view(self.tensor.detach()), state._replace(stages=stages)

    def place_of(self, chain: GroupChain, name: str, tensor: Tensor) -> tuple[tuple[int, ...], int]:
        """(the shape of a state tensor for all of the parameter, where this shard begins in it)."""
        if self.whole:
            return tuple(tensor.shape), 0
        if self._kinds is None:
            self._kinds = kinds_of(chain, self.tensor)
        kind, block = self._kinds.get(name, "leaf"), block_size_of(chain.stages)
        if kind == "element":
            return tuple(self.param.shape), self.start
        if kind == "block":
            return (-(-self.param.numel() // block),), self.start // block
        return tuple(tensor.shape), 0


def kinds_of(chain: GroupChain, like: Tensor) -> dict[str, FieldKind]:
    """By the names that torch.optim has for them, what the tensors of a chain's state are.

    Seen at the state of three blocks; nothing for a chain that needs its parameter whole.
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
