"""``ZeroRedundancyOptimizer.state``: the state that one rank keeps, by parameter."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.engine.messages import format_value


class ShardState(MutableMapping[Tensor, dict[str, Any]]):
    """View of the state of one rank's shard, with an entry for every parameter.

    The entry of an owned parameter is its dict in the optimizer over the shard. For a part of a
    parameter, the tensors are flat and belong to the part. The entry is empty if the rank owns
    nothing of the parameter, or if there is no state yet.

    The view is never empty. ``torch.distributed.checkpoint.state_dict`` makes a step if
    ``optimizer.state`` is empty, to create state; here it makes none.

    Args:
        params: of the optimizer, by path.
        owned: by path, the tensors in the groups of ``optim``: the parameter, or parts of it.
        optim: the optimizer over the shard.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        owned: Mapping[str, Sequence[Tensor]],
        optim: torch.optim.Optimizer,
    ) -> None:
        self._paths = {param: path for path, param in params.items()}
        self._by_path = owned
        self._optim = optim

    def _owned(self, param: Any) -> Sequence[Tensor]:
        if param not in self:
            raise KeyError(
                f"this optimizer does not have the parameter {format_value(param)}; ask for one of "
                "its param_groups"
            )
        return self._by_path.get(self._paths[param], ())

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        """Return the entries of a parameter; entries of several ranges are concatenated.

        Raises:
            KeyError: the optimizer does not have the parameter.
        """
        known = self._optim.state
        found = [known[one] for one in self._owned(param) if one in known]
        if len(found) < 2:
            return found[0] if found else {}
        return {name: _join([one[name] for one in found]) for name in found[0]}

    def __setitem__(self, param: Tensor, entries: Mapping[str, Any]) -> None:
        """Replace the entries of a parameter. Their values are copied at the next step.

        Raises:
            KeyError: the optimizer does not have the parameter.
            ValueError: the rank owns nothing of the parameter, or several ranges.
        """
        owned = self._owned(param)
        if len(owned) == 1:
            self._optim.state[owned[0]] = dict(entries)
        elif owned or entries:
            raise ValueError(
                f"the state of {self._paths[param]!r} cannot be replaced on this rank, which owns "
                f"{len(owned)} ranges of the parameter, not one; call load_state_dict() "
                "on all ranks"
            )

    def __delitem__(self, param: Tensor) -> None:
        raise TypeError(
            "the state of a ZeroRedundancyOptimizer cannot be deleted; make a new optimizer"
        )

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __contains__(self, param: object) -> bool:
        return isinstance(param, Tensor) and param in self._paths

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)!r})"


def _join(parts: list[Any]) -> Any:
    """Concatenate the values of several ranges. All ranges have the same step count."""
    if isinstance(parts[0], Tensor) and parts[0].dim():
        return torch.cat([one.reshape(-1) for one in parts])
    return parts[0]
