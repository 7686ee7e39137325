"""``.optim``: a torch-like optimizer over one rank's shard."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.compiling import uncompiled
from functional_optim.core.forms import map_state
from functional_optim.core.state import LeafState
from functional_optim.core.torch_state import from_entries
from sharding.zero.local_shard import LocalShard
from sharding.zero.params import Groups
from sharding.zero.shard import Shard
from sharding.zero.store import Piece, Store

Totals = Callable[[Mapping[str, Tensor]], Tensor]
"""From the addends of this rank's parameters to the total over all ranks."""


class ShardOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer over what one rank owns; ``ZeroRedundancyOptimizer.optim``.

    A parameter that the rank owns whole stands in the groups itself; of one that it owns a part of,
    a flat view of that part does. State is in flat tensors, and ``state`` has views of them, so
    that writing in place is seen; other tensors put there are copied into them at the next step.

    Args:
        groups: this rank's part of every group, empty ones too.
        defaults: the options of all groups.
        shard: what is stepped.
        totals: adds up over ranks what a chain needs to know of all gradients.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        defaults: dict[str, Any],
        shard: Shard,
        totals: Totals,
    ) -> None:
        self._shard = shard
        self._totals = totals
        self._entries: dict[int, tuple[Store, dict[str, Tensor]]] = {}
        super().__init__([dict(group) for group in groups], defaults)
        self.complete()

    def complete(self) -> None:
        """State for all that is trainable by now."""
        self._shard.complete(self.param_groups)
        for piece in self._shard.every():
            known = self._entries.get(id(piece))
            if piece.store is not None and (known is None or known[0] is not piece.store):
                self._show(piece)

    def show(self) -> None:
        """Let ``state`` have the views of all state there is."""
        for piece in self._shard.every():
            if piece.store is not None:
                self._show(piece)

    def _show(self, piece: Piece) -> None:
        assert piece.store is not None
        chain = self._shard.chain_of(piece, self.param_groups)
        entries = piece.store.entries(piece, chain)
        self._entries[id(piece)] = (piece.store, entries)
        self.state[piece.key] = dict(entries)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every owned range whose parameter has a gradient.

        Parameters are not made whole on the other ranks: that is ``ZeroRedundancyOptimizer.step``.

        Args:
            closure: re-evaluates the model and returns the loss; called first, with autograd on.

        Returns:
            What the closure returned, else None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        local = self.local
        grads = [piece.param.grad for piece in local.pieces]
        measured: list[Tensor] = []
        for _ in range(local.measured_stages):
            added = local.measure(grads, measured=measured)
            by_path = {path: added[place] for path, place in local.places.items()}
            measured.append(self._totals(by_path))
        local.step(grads, measured=measured)
        return loss

    @property
    def local(self) -> LocalShard:
        """The same, given its gradients, in place of reading them from ``.grad``."""
        self.complete()
        self.adopt()
        return LocalShard(self, self._shard)

    @uncompiled
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over options and state of this shard in torch's form.

        Raises:
            ValueError: other groups, or a state that does not fit; nothing is changed then.
        """
        before = self.state, self.param_groups
        try:
            super().load_state_dict(state_dict)
            self.adopt()
        except Exception:
            self.state, self.param_groups = before
            raise

    def adopt(self) -> None:
        """Take over what someone has put into ``state``.

        Raises:
            ValueError: it does not fit; nothing is taken over then.
        """
        read = []
        for piece in self._shard.every():
            if id(piece) not in self._entries:
                continue
            found, (_, kept) = self.state[piece.key], self._entries[id(piece)]
            if found.keys() == kept.keys() and all(found[key] is kept[key] for key in kept):
                continue
            read.append((piece, read_piece(self._shard, self.param_groups, piece, found)))
        for piece, state in read:
            copy_state(self._shard, self.param_groups, piece, state)
            self._show(piece)


def load_piece(shard: Shard, groups: Groups, piece: Piece, entries: Mapping[str, Any]) -> None:
    """Give a piece the state in torch-like entries of its own shape.

    Raises:
        ValueError: they do not fit; nothing is changed then.
    """
    copy_state(shard, groups, piece, read_piece(shard, groups, piece, entries))


def read_piece(shard: Shard, groups: Groups, piece: Piece, entries: Mapping[str, Any]) -> LeafState:
    """The state in torch-like entries, checked."""
    chain = shard.chain_of(piece, groups)
    return from_entries(chain.stages, chain.hypers, piece.key, entries, piece.path)


def copy_state(shard: Shard, groups: Groups, piece: Piece, state: LeafState) -> None:
    """Write a state of a piece's shape into its store."""
    assert piece.store is not None
    own = piece.store.shaped(piece, shard.chain_of(piece, groups))
    with torch.no_grad():
        own.step.copy_(state.step)
        for target, source in zip(own.stages, state.stages, strict=True):
            map_state(lambda a, b: a.copy_(b), target, source)
