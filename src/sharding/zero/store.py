"""The state of what a rank owns: flat tensors, of which each owned range has its slice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, starmap
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from functional_optim.bound_buffer import keeps_flat_state
from functional_optim.forms import map_state, real_view
from functional_optim.initial import fields_of, init_leaf
from functional_optim.recipe import Chain
from functional_optim.stage import grain_of
from functional_optim.state import LeafState, state_tensors
from functional_optim.torch_state import to_entries
from sharding.zero.memory import Home, adjoins, joined


def _no_step() -> Tensor:
    return torch.zeros((), dtype=torch.int64, device="cpu")


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
    step: Tensor = field(default_factory=_no_step)
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

    def elements(self, home: Home) -> Tensor | None:
        """Its elements where they lie, in one dimension; None where they lie apart."""
        return None if home.flat is None else home.flat[self.start : self.stop]


class Request(NamedTuple):
    """A range to be stepped, and its gradient: in one dimension, or the parameter's own shape."""

    piece: Piece
    start: int
    stop: int
    grad: Tensor


Used = tuple[tuple[bool, ...], ...]
"""For each stage, and each field of its state."""


class Store:
    """The state of some pieces of one group, made at once.

    Where the chain is pointwise and its state as long as the parameters, pieces stand end to end in
    flat tensors, so that neighbours can be stepped as one. Otherwise a store holds one piece.

    Args:
        chain: of the group.
        pieces: in the order in which they lie in memory.
        homes: where that is.
    """

    def __init__(self, chain: Chain, pieces: Sequence[Piece], homes: Sequence[Home]) -> None:
        self.stages = chain.stages
        # Pieces hold their store; were they held by it, parameters would outlive their last user.
        self._pieces = tuple(map(ref, pieces))
        self.flat = len(pieces) > 1 or is_flat(chain, homes[0])
        self.grain = grain_of(chain.stages)
        with torch.no_grad():
            start = self._laid_out(pieces, homes) if self.flat else self._one(pieces[0], homes[0])
            self.numel = start.numel()
            self._form = start.shape, start.dtype
            self.states = init_leaf(chain.stages, chain.hypers, start).stages
        self._of_blocks = self._found_of_blocks(chain, start) if self.flat else set()
        self._kept = self._layout(chain.hypers)
        self.is_empty = not any(field.tensors != 0 for fields in self._kept for field in fields)
        """Whether it holds no tensor: all state there may be is for an option that is off."""
        self._fitted: tuple[Chain | None, Used] = (None, ())
        self.kinds = kinds_of(chain, pieces[0].key)
        for piece in pieces:
            piece.store = self

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces, in order."""
        return tuple(piece for one in self._pieces if (piece := one()) is not None)

    def _one(self, piece: Piece, home: Home) -> Tensor:
        piece.offset = 0
        elements = piece.elements(home)
        return home.seen if piece.whole or elements is None else elements

    def _laid_out(self, pieces: Sequence[Piece], homes: Sequence[Home]) -> Tensor:
        """The pieces end to end, each from a multiple of the grain on: views where they lie so."""
        end = 0
        views = []
        for piece, home in zip(pieces, homes, strict=True):
            piece.offset = -(-end // self.grain) * self.grain
            end = piece.offset + piece.numel
            views.append(home.flat[piece.start : piece.stop])  # type: ignore[index]  # a piece with others lies flat
        if end == sum(view.numel() for view in views) and all(starmap(adjoins, pairwise(views))):
            return joined(views)
        laid = views[0].new_zeros(end)
        for piece, view in zip(pieces, views, strict=True):
            laid[piece.offset : piece.offset + piece.numel] = view
        return laid

    def _found_of_blocks(self, chain: Chain, like: Tensor) -> set[int]:
        """The tensors with an entry for each block: one block of one element looks like another."""
        found: set[int] = set()
        if self.grain > 1:
            probe = like.new_zeros(3 * self.grain)
            with torch.no_grad():
                shown = init_leaf(chain.stages, chain.hypers, probe).stages

            def see(flat: Tensor, one: Tensor) -> Tensor:
                if one.numel() != probe.numel():
                    found.add(id(flat))
                return flat

            for state, one in zip(self.states, shown, strict=True):
                map_state(see, state, one)
        return found

    def _layout(self, hypers: Sequence[Any]) -> Any:
        return fields_of(self.stages, hypers, *self._form)

    def misfit(self, chain: Chain) -> str | None:
        """Why a chain of now cannot go on with this state; None if it can."""
        if chain.stages != self.stages:
            return "an option now asks for another chain than the state was made for"
        layout = self._layout(chain.hypers)
        for stage, fields, kept in zip(self.stages, layout, self._kept, strict=True):
            for now, before in zip(fields, kept, strict=True):
                if now.tensors and not before.tensors:
                    return f"{stage.name} now needs {now.name}, which was not made"
        return None

    def used(self, chain: Chain) -> Used:
        """For each field of each stage, whether a chain of now uses it.

        Raises:
            ValueError: an option asks for what was not made.
        """
        if self._fitted[0] is not chain:
            why = self.misfit(chain)
            if why is not None:
                raise ValueError(
                    f"{why}, at {self.pieces[0].path!r}: set that option when the optimizer is "
                    "constructed, or load a state dict that has it"
                )
            layout = self._layout(chain.hypers)
            used = tuple(tuple(one.tensors != 0 for one in fields) for fields in layout)
            self._fitted = (chain, used)
        return self._fitted[1]

    def mark_changed(self) -> None:
        """Tell autograd that the state was written to, by ways that it does not see."""
        written = [one for one in state_tensors(self.states) if not one.is_inference()]
        torch.autograd.graph.increment_version(written)

    def cut(self, used: Used, start: int, stop: int) -> tuple[Any, ...]:
        """Elements [start, stop) of the state that is used, as views."""
        return self._states(used, lambda flat: self._part(flat, start, stop))

    def _states(self, used: Used, cut: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        found = []
        for flags, state in zip(used, self.states, strict=True):
            if state == ():
                found.append(state)
                continue
            # What an option that is off has left behind is not used, as in torch.
            fields = [value if flag else [] for flag, value in zip(flags, state, strict=True)]
            found.append(map_state(cut, type(state)(*fields)))
        return tuple(found)

    def _part(self, flat: Tensor, start: int, stop: int) -> Tensor:
        if not self.flat:
            return flat
        if id(flat) not in self._of_blocks:
            return flat[start:stop]
        return flat[start // self.grain : -(-stop // self.grain)]

    def shaped(self, piece: Piece, chain: Chain) -> LeafState:
        """The state of a piece in the shape of its key, as views."""
        key = piece.key

        def view(flat: Tensor) -> Tensor:
            part = self._part(flat, piece.offset, piece.offset + piece.numel)
            if not self.flat or id(flat) in self._of_blocks:
                return part
            return part.as_strided(key.shape, key.stride(), part.storage_offset())

        return LeafState(piece.step, self._states(self.used(chain), view))

    def entries(self, piece: Piece, chain: Chain) -> dict[str, Tensor]:
        """The state of a piece as torch.optim has it: views, "step" first."""
        return to_entries(self.stages, chain.hypers, piece.key, self.shaped(piece, chain))


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
