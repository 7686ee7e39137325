"""The state of what a rank owns: flat tensors, of which each owned range has its slice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from functional_optim.core.forms import map_state, real_view
from functional_optim.core.initial import Field, fields_of, init_leaf, none_made
from functional_optim.core.stage import grain_of, in_full_blocks
from functional_optim.core.state import LeafState
from functional_optim.core.torch_state import to_entries
from functional_optim.frontends.recipe import Chain
from functional_optim.optimizer.bound_buffer import keeps_flat_state
from sharding.zero.memory import Home

AT_ONCE = 1 << 18
"""Elements of which state is made at once, before it is copied to where it belongs."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Piece:
    """Elements [start, stop) of a parameter, which this rank owns."""

    path: str
    start: int
    stop: int
    whole: bool
    group: int
    """The number of its parameter group."""
    param: Tensor
    key: Tensor
    """What stands for it in ``.optim``: the parameter itself, or a view of the range."""
    store: "Store | None" = None
    """Its state; None while it has never been trainable."""
    offset: int = 0
    """Its first element in the store."""
    step: Tensor = field(default_factory=none_made)
    """How many steps it has made: 0-d, of which writing in place is seen."""
    done: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of it that were stepped in this iteration, counted in the parameter."""

    @property
    def numel(self) -> int:
        """How many elements."""
        return self.stop - self.start

    @property
    def trainable(self) -> bool:
        """Whether its parameter is, now."""
        return self.param.requires_grad

    @property
    def wants_state(self) -> bool:
        """Whether it is, or was, to be stepped."""
        return self.trainable or self.param.grad is not None

    def holds(self, start: int, stop: int) -> bool:
        """Whether elements [start, stop) of the parameter are in it."""
        return self.start <= start <= stop <= self.stop and (start < stop or not self.numel)


class Request(NamedTuple):
    """A range to be stepped, and its gradient: in one dimension, or the parameter's own shape."""

    piece: Piece
    start: int
    stop: int
    grad: Tensor


Fields = tuple[tuple[Field, ...], ...]
"""Of each stage, the fields of its state."""


class Store:
    """The state of some pieces of one group, made at once.

    Where the chain is pointwise and its state as long as the parameters, it is in flat tensors of
    which each piece has its slice. Otherwise a store holds one piece.

    Args:
        chain: of the group.
        pieces: that are to have it.
        homes: where their elements are.
    """

    def __init__(self, chain: Chain, pieces: Sequence[Piece], homes: Sequence[Home]) -> None:
        self.stages = chain.stages
        # Pieces hold their store; were they held by it, parameters would outlive their last user.
        self._pieces = tuple(map(ref, pieces))
        self.flat = len(pieces) > 1 or is_flat(chain, homes[0])
        self.grain = grain_of(chain.stages)
        self.kinds = kinds_of(chain, pieces[0].key)
        self._of_blocks: set[int] = set()  # the tensors that have an entry for each block
        with torch.no_grad():
            first = pieces[0].key.detach()
            numel = self._placed(pieces)
            self._form = torch.Size([numel]) if self.flat else first.shape, first.dtype
            self._made = fields_of(self.stages, chain.hypers, *self._form)
            if self.flat:
                self.states = self._allocated(chain, first, numel)
                for piece, home in zip(pieces, homes, strict=True):
                    self._begin(chain, piece, home)
            else:
                self.states = init_leaf(chain.stages, chain.hypers, first).stages
        self.is_empty = not any(one.tensors != 0 for fields in self._made for one in fields)
        """Whether it holds no tensor: all state there may be is for an option that is off."""
        self._fitted: tuple[Chain | None, Fields] = (None, ())
        for piece in pieces:
            piece.store = self

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces, in order."""
        return tuple(piece for one in self._pieces if (piece := one()) is not None)

    def _placed(self, pieces: Sequence[Piece]) -> int:
        """Pieces end to end, each from a multiple of the grain on: how many elements that takes."""
        end = 0
        for piece in pieces:
            piece.offset = in_full_blocks(end, self.grain)
            end = piece.offset + piece.numel
        return end

    def _allocated(self, chain: Chain, like: Tensor, numel: int) -> tuple[Any, ...]:
        """Flat tensors for so many elements; a probe shows how many each has for a block."""
        probe = like.new_zeros(3 * self.grain)

        def allocated(one: Tensor) -> Tensor:
            if one.numel() == probe.numel():
                return like.new_empty(numel, dtype=one.dtype, device=one.device)
            made = like.new_empty(-(-numel // self.grain), dtype=one.dtype, device=one.device)
            self._of_blocks.add(id(made))
            return made

        shown = init_leaf(chain.stages, chain.hypers, probe).stages
        return tuple(map_state(allocated, state) for state in shown)

    def _begin(self, chain: Chain, piece: Piece, home: Home) -> None:
        """The state of a piece before its first step: some blocks at a time, as it is copied."""
        assert home.flat is not None, "it is, of what has flat state"
        many = in_full_blocks(AT_ONCE, self.grain)
        for start in range(piece.start, piece.stop, many):
            stop = min(start + many, piece.stop)
            made = init_leaf(chain.stages, chain.hypers, home.flat[start:stop]).stages
            own = self._cut(piece, self._made, start, stop)
            for into, values in zip(own, made, strict=True):
                map_state(lambda a, b: a.copy_(b), into, values)

    def misfit(self, chain: Chain) -> str | None:
        """Why a chain of now cannot go on with this state; None if it can."""
        if chain.stages != self.stages:
            return "an option now asks for another chain than the state was made for"
        layout = fields_of(self.stages, chain.hypers, *self._form)
        for stage, fields, made in zip(self.stages, layout, self._made, strict=True):
            for now, before in zip(fields, made, strict=True):
                if now.tensors and not before.tensors:
                    return f"{stage.name} now needs {now.name}, which was not made"
        return None

    def fields(self, chain: Chain) -> Fields:
        """What a chain of now has of this state.

        Raises:
            ValueError: it asks for what was not made.
        """
        if self._fitted[0] is not chain:
            why = self.misfit(chain)
            if why is not None:
                raise ValueError(
                    f"{why}, at {self.pieces[0].path!r}: set that option when the optimizer is "
                    "constructed, or load a state dict that has it"
                )
            self._fitted = (chain, fields_of(self.stages, chain.hypers, *self._form))
        return self._fitted[1]

    def cut(self, piece: Piece, chain: Chain, start: int, stop: int) -> tuple[Any, ...]:
        """The state of elements [start, stop) of a parameter, as views in one dimension."""
        return self._cut(piece, self.fields(chain), start, stop)

    def _cut(self, piece: Piece, layout: Fields, start: int, stop: int) -> tuple[Any, ...]:
        return self._views(layout, lambda flat: self._part(flat, piece, start, stop))

    def shaped(self, piece: Piece, chain: Chain) -> LeafState:
        """The state of a piece in the shape of its key, as views."""
        key = piece.key

        def view(flat: Tensor) -> Tensor:
            part = self._part(flat, piece, piece.start, piece.stop)
            if not self.flat or id(flat) in self._of_blocks:
                return part
            return part.as_strided(key.shape, key.stride(), part.storage_offset())

        return LeafState(piece.step, self._views(self.fields(chain), view))

    def entries(self, piece: Piece, chain: Chain) -> dict[str, Tensor]:
        """The state of a piece as torch.optim has it: views, "step" first."""
        return to_entries(self.stages, chain.hypers, piece.key, self.shaped(piece, chain))

    def _views(self, layout: Fields, view: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        found = []
        for fields, state in zip(layout, self.states, strict=True):
            if state == ():
                found.append(state)
                continue
            # What an option that is off has left behind is not used, as in torch.
            pairs = zip(fields, state, strict=True)
            values = [[] if one.tensors == 0 else value for one, value in pairs]
            found.append(map_state(view, type(state)(*values)))
        return tuple(found)

    def _part(self, flat: Tensor, piece: Piece, start: int, stop: int) -> Tensor:
        """What a tensor has of elements [start, stop) of a parameter."""
        if not self.flat:
            return flat
        begin, end = (piece.offset + at - piece.start for at in (start, stop))
        if id(flat) not in self._of_blocks:
            return flat[begin:end]
        return flat[begin // self.grain : -(-end // self.grain)]


FieldKind = Literal["element", "block", "leaf"]
"""Whether a state tensor has an entry for each element, for each block, or any for the leaf."""


def kinds_of(chain: Chain, key: Tensor) -> dict[str, FieldKind]:
    """By the names that torch.optim has for them, what the tensors of a chain's state are."""
    return {
        name: _kind(tensor, grain_of(chain.stages)) for name, tensor in probed(chain, key).items()
    }


def probed(chain: Chain, key: Tensor) -> dict[str, Tensor]:
    """The state of a parameter of three blocks; nothing for a chain that needs it whole."""
    if any(stage.kind != "pointwise" for stage in chain.stages):
        return {}
    with torch.no_grad():
        probe = key.detach().new_zeros(3 * grain_of(chain.stages))
        state = init_leaf(chain.stages, chain.hypers, probe)
        return to_entries(chain.stages, chain.hypers, probe, state)


def _kind(tensor: Tensor, unit: int) -> FieldKind:
    if tensor.shape == (3 * unit,):
        return "element"
    return "block" if tensor.shape == (3,) else "leaf"


def is_flat(chain: Chain, home: Home) -> bool:
    """Whether pieces of a parameter can share a store with others.

    Blocks are of elements in the order of the shape: where they lie in another, they are found
    only in the parameter itself.
    """
    in_order = home.param.is_contiguous() and not home.param.is_complex()
    if home.flat is None or (grain_of(chain.stages) > 1 and not in_order):
        return False
    shape, dtype = real_view(home.param.detach()).shape, home.param.dtype.to_real()
    return keeps_flat_state(chain.stages, chain.hypers, [shape], dtype)
