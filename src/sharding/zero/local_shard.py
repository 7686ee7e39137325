"""Local shard: the range of one parameter that this rank owns, and its state."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from functional_optim.core.checks import check_grad
from functional_optim.core.stage import block_size_of, in_full_blocks
from functional_optim.core.state import LeafState, map_state
from functional_optim.core.state_init import init_leaf
from functional_optim.core.state_reinit import reinit_state
from functional_optim.core.torch_state import entry_layout, from_entries, to_entries
from functional_optim.frontends.recipe import GroupChain
from functional_optim.optimizer.bound_buffer import copy_states, has_flat_state
from functional_optim.plan.step_counts import is_step_count

CHUNK = 1 << 18
"""Number of elements whose state is created at once: encoded state is created in float32 first."""

FieldKind = Literal["element", "block", "leaf"]
"""A state tensor has an entry for each element, or for each block, or has any other shape."""


@dataclass(slots=True, eq=False)
class LocalShard:
    """Elements [start, stop) of a parameter, owned by this rank: a leaf of the engine."""

    path: str
    start: int
    stop: int
    whole: bool
    group: int
    """The number of the parameter group."""
    param: Tensor
    tensor: Tensor
    """The tensor in ``.optim``: the parameter itself, or a flat view of the range."""
    state: dict[str, Any] | None = None
    """The entry in ``.optim.state``; None if the shard has never been trainable."""
    _kinds: dict[str, FieldKind] | None = field(default=None, repr=False)
    _init_hypers: tuple[Any, ...] | None = field(default=None, repr=False)
    """The hyper-parameters with which the state was created."""

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def is_trainable(self) -> bool:
        """Return True if the parameter is trainable now."""
        return self.param.requires_grad

    @property
    def needs_state(self) -> bool:
        """Return True if the shard is stepped, or was: it is trainable, or has a gradient."""
        return self.is_trainable or self.param.grad is not None

    @property
    def device(self) -> str:
        return self.tensor.device.type

    def init_state(self, chain: GroupChain) -> None:
        """Create the state before the first step."""
        self._kinds, self._init_hypers = None, chain.hypers
        with torch.no_grad():
            if self._is_one_chunk(chain):
                self.state = self._first_entries(chain)
                return
            self.state = self._allocate(chain)
            for start, stop in self._chunks(chain):
                param, into = self.slice_state(chain, start, stop)
                copy_states([into], [init_leaf(chain.stages, chain.hypers, param)])

    def refresh_first_state(self, chain: GroupChain) -> None:
        """Before the first step, reset state that starts as the parameter to its current value.

        A caller may have written to the parameter, for example by loading a model. Other state is
        not changed, because a caller may have written to it.
        """
        entries = self.state
        assert entries is not None, "completed before"
        if entries and entries.get("step") != 0:
            return
        with torch.no_grad():
            if not entries or self.missing_entries(chain):
                new = self._first_entries(chain)
                entries.update({key: one for key, one in new.items() if entries.get(key) is None})
            if self._is_one_chunk(chain):
                self._reinit(chain, self.tensor.detach(), self.state_for(chain))
            else:
                for start, stop in self._chunks(chain):
                    self._reinit(chain, *self.slice_state(chain, start, stop))

    def _reinit(self, chain: GroupChain, param: Tensor, state: LeafState) -> None:
        """Write the current value of the parameter into state that starts as the parameter."""
        new = reinit_state(chain.stages, chain.hypers, param, state, self._init_hypers)
        if new is not state:
            copy_states([state], [new])

    def _chunks(self, chain: GroupChain) -> Iterator[tuple[int, int]]:
        """Yield the ranges of elements whose state is created at once."""
        many = in_full_blocks(CHUNK, block_size_of(chain.stages))
        for start in range(self.start, self.stop, many):
            yield start, min(start + many, self.stop)

    def _is_one_chunk(self, chain: GroupChain) -> bool:
        """Return True if all state is created at once: the shard is small, or cannot be cut."""
        tensor = self.tensor
        if self.numel <= CHUNK or tensor.is_complex() or not tensor.is_contiguous():
            return True
        return not has_flat_state(chain.stages, chain.hypers, [tensor.shape], tensor.dtype)

    def _first_entries(self, chain: GroupChain) -> dict[str, Any]:
        made = init_leaf(chain.stages, chain.hypers, self.tensor.detach())
        return to_entries(chain.stages, chain.hypers, self.tensor, made)

    def _allocate(self, chain: GroupChain) -> dict[str, Any]:
        """Return state without values. The state of three blocks shows its per-block tensors."""
        block, like = block_size_of(chain.stages), self.tensor.detach()

        def allocate(one: Tensor) -> Tensor:
            shape = like.shape if one.numel() == 3 * block else (-(-self.numel // block),)
            return like.new_empty(shape, dtype=one.dtype, device=one.device)

        shown = init_leaf(chain.stages, chain.hypers, like.new_zeros(3 * block))
        made = shown._replace(stages=tuple(map_state(allocate, one) for one in shown.stages))
        return to_entries(chain.stages, chain.hypers, like, made)

    def missing_entries(self, chain: GroupChain) -> list[str]:
        """Return the names of the entries that a chain needs and the state does not have."""
        wanted = entry_layout(
            chain.stages, chain.hypers, self.tensor.shape, self.tensor.dtype
        ).dtypes
        return [] if self.state is None else [name for name in wanted if name not in self.state]

    def state_for(self, chain: GroupChain) -> LeafState:
        """Return the state as a chain needs it, with the same tensors as the entries.

        Other entries are left out, as in torch. Missing entries are created if no entry but the
        step count is there; otherwise a missing entry raises ValueError.
        """
        entries = self.state
        assert entries is not None, "completed before"
        lacking = self.missing_entries(chain)
        if lacking and any(
            isinstance(one, Tensor) and not is_step_count(one) for one in entries.values()
        ):
            raise ValueError(
                f"an option now needs {', '.join(lacking)}, which was not made, at {self.path!r}: "
                "set that option when the optimizer is constructed, or load a state dict that has "
                "it"
            )
        count = entries.get("step")
        if is_step_count(
            count
        ):  # without a read of the count: a step count of 1 is read in its place
            known = {**entries, "step": 1}
            made = self.read_entries(chain, known)
            state = made._replace(step=count) if int(made.step) else made
        else:
            state = self.read_entries(chain, entries)
        made_entries = to_entries(chain.stages, chain.hypers, self.tensor, state)
        if any(entries.get(name) is not value for name, value in made_entries.items()):
            entries.update(made_entries)  # the caller changed them, or an option was turned on
        return state

    def entries(self, chain: GroupChain) -> dict[str, Tensor]:
        """Return the state as torch.optim has it, "step" first, without copies."""
        return to_entries(chain.stages, chain.hypers, self.tensor, self.state_for(chain))

    def read_entries(self, chain: GroupChain, entries: Mapping[str, Any]) -> LeafState:
        """Return checked torch-like entries, in the shape of the shard, as a state."""
        return from_entries(
            chain.stages, chain.hypers, self.tensor, entries, self.path, reinit=True
        )

    def copy_state(self, chain: GroupChain, state: LeafState) -> None:
        """Copy the values of another state of the shard."""
        copy_states([self.state_for(chain)], [state])

    def slice_state(self, chain: GroupChain, start: int, stop: int) -> tuple[Tensor, LeafState]:
        """Return elements [start, stop) of the parameter and their state, as flat views.

        ``start`` is at the start of a block of state, ``stop`` at the end of a block or the shard.
        """
        begin, end, block = start - self.start, stop - self.start, block_size_of(chain.stages)

        def view(tensor: Tensor) -> Tensor:
            flat = tensor.view(-1)
            per_block = tensor.numel() != self.numel
            return flat[begin // block : -(-end // block)] if per_block else flat[begin:end]

        state = self.state_for(chain)
        stages = tuple(map_state(view, one) for one in state.stages)
        return view(self.tensor.detach()), state._replace(stages=stages)

    def position_of(
        self, chain: GroupChain, name: str, tensor: Tensor
    ) -> tuple[tuple[int, ...], int]:
        """Return the shape of a whole parameter's state tensor, and the shard's offset."""
        if self.whole:
            return tuple(tensor.shape), 0
        if self._kinds is None:
            self._kinds = field_kinds_of(chain, self.tensor)
        kind, block = self._kinds.get(name, "leaf"), block_size_of(chain.stages)
        if kind == "element":
            return tuple(self.param.shape), self.start
        if kind == "block":
            return (-(-self.param.numel() // block),), self.start // block
        return tuple(tensor.shape), 0

    def gradient_from(self, given: Any) -> Tensor:
        """Return the gradient of the shard, in its shape, from one of the shard or its parameter.

        Raises:
            RuntimeError: a sparse gradient, for a part of a parameter.
            TypeError, ValueError: the gradient does not fit.
        """
        grad = self._slice_gradient(given) if isinstance(given, Tensor) else given
        check_grad(self.tensor, grad, self.path)
        return grad.detach() if grad.requires_grad else grad

    def own_gradient(self) -> Tensor | None:
        """Return the parameter's ``.grad`` in the shape of the shard, or None. torch checks it."""
        grad = self.param.grad
        if grad is None:
            return None
        own = grad if self.whole else self._slice_gradient(grad)
        return own.detach() if own.requires_grad else own

    def _slice_gradient(self, grad: Tensor) -> Tensor:
        in_shape = grad.shape == self.param.shape
        if self.whole:
            flat = not in_shape and grad.dim() == 1 and grad.numel() == self.numel
            return grad.reshape(self.param.shape) if flat else grad
        if not in_shape:
            return grad
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"the gradient of {self.path!r} is sparse, and the parameter is cut between ranks; "
                "take a policy that leaves parameters whole, or dense gradients"
            )
        return grad.reshape(-1)[self.start : self.stop]


def field_kinds_of(chain: GroupChain, like: Tensor) -> dict[str, FieldKind]:
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
