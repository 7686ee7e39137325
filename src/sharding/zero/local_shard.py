"""Local shard: the range of one parameter that this rank owns, and its state."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from functional_optim import LeafState
from functional_optim.engine.recipes import GroupChain
from functional_optim.engine.states import (
    add_new_stages,
    copy_states,
    entry_layout,
    from_entries,
    init_leaf,
    is_step_count,
    leaf_states,
    to_entries,
)
from functional_optim.engine.tensors import check_grad
from sharding.ownership import OwnedRange


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
    states: MutableMapping[Tensor, dict[str, Any]]
    """``.optim.state``, with an entry for each shard that has state."""
    was_made: bool = False
    """True if state was created. A caller may have removed it since, or have set other state."""
    _init_hypers: tuple[Any, ...] | None = field(default=None, repr=False)
    """The hyper-parameters with which the state was created."""

    @property
    def has_state(self) -> bool:
        return self.was_made or self.tensor in self.states

    def init_entries(self, chain: GroupChain) -> dict[str, Any]:
        """Return the entries of the state before the first step."""
        self.was_made, self._init_hypers = True, chain.hypers
        with torch.no_grad():
            made = init_leaf(chain.stages, chain.hypers, self.tensor.detach())
        return to_entries(chain.stages, chain.hypers, self.tensor, made)

    def missing_entries(self, chain: GroupChain) -> list[str]:
        """Return the names of the entries that a chain needs and the state does not have."""
        like = self.tensor.shape, self.tensor.dtype
        wanted = entry_layout(chain.stages, chain.hypers, *like).dtypes
        entries = self.states.get(self.tensor)
        return [] if entries is None else [name for name in wanted if name not in entries]

    def state_for(self, chain: GroupChain, *, begins: bool = False) -> LeafState:
        """Return the state as a chain needs it, with the same tensors as the entries.

        Other entries are left out, as in torch. Missing entries are created if no entry but the
        step count is there; otherwise a missing entry raises ValueError.

        ``begins`` is True if this may be the first step. Before the first step, state that starts
        as the parameter gets the current value of the parameter, and missing entries are created.
        """
        entries = self.states.setdefault(self.tensor, {})
        count, own = entries.get("step"), (chain.stages, chain.hypers, self.tensor)
        if begins and (not entries or count == 0):
            given = chain.stages, chain.hypers, [self.tensor], self.states, [self.path]
            return leaf_states(*given, [True], self._init_hypers)[0]
        entries.update(add_new_stages(*own, entries, self.path))
        lacking = self.missing_entries(chain)
        if lacking and any(
            isinstance(one, Tensor) and not is_step_count(one) for one in entries.values()
        ):
            raise ValueError(
                f"an option now needs {', '.join(lacking)}, which was not made, at {self.path!r}: "
                "set that option when the optimizer is constructed, or load a state dict that has "
                "it"
            )
        state = from_entries(*own, entries, self.path, reinit=True, counted=is_step_count(count))
        made = to_entries(*own, state)
        if any(entries.get(name) is not value for name, value in made.items()):
            entries.update(made)  # the caller changed them, or an option was turned on
        return state

    def read_entries(self, chain: GroupChain, entries: Mapping[str, Any]) -> LeafState:
        """Return checked torch-like entries, in the shape of the shard, as a state."""
        return from_entries(
            chain.stages, chain.hypers, self.tensor, entries, self.path, reinit=True
        )

    def copy_state(self, chain: GroupChain, state: LeafState) -> None:
        """Copy the values of another state of the shard."""
        copy_states([self.state_for(chain)], [state])

    def gradient_from(self, given: Any) -> Tensor:
        """Return the gradient of the shard, in its shape, from one of the shard or its parameter.

        Raises:
            RuntimeError: a sparse gradient, for a part of a parameter.
            TypeError, ValueError: the gradient does not fit.
        """
        grad: Tensor = given
        if isinstance(given, Tensor):
            if given.shape == self.param.shape:
                grad = slice_gradient(given, self)
            elif self.whole and given.dim() == 1 and given.numel() == self.param.numel():
                grad = given.reshape(self.param.shape)
        check_grad(self.tensor, grad, self.path)
        return grad.detach() if grad.requires_grad else grad


def slice_gradient(grad: Tensor, one: LocalShard | OwnedRange) -> Tensor:
    """Return the gradient of a range of elements, from that of its whole parameter.

    Raise RuntimeError for a sparse gradient of a parameter that is cut.
    """
    if one.whole:
        return grad
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of {one.path!r} is sparse, and the parameter is cut between ranks; "
            "take a policy that leaves parameters whole, or dense gradients"
        )
    return grad.reshape(-1)[one.start : one.stop]
