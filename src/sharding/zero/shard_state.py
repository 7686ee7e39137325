"""``ZeroRedundancyOptimizer.state``: the state that one rank keeps, by parameter."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.brief import brief


class ShardState(MutableMapping[Tensor, dict[str, Any]]):
    """View of the state of one rank's shard; every parameter of the optimizer has an entry.

    The entry of a parameter that the rank owns is the dict that the optimizer over the shard has
    for it. Of a part of a parameter, its tensors are those of the part, in one dimension. The entry
    of a parameter of which the rank owns nothing, or which has no state yet, is empty.

    So the view is never empty. ``torch.distributed.checkpoint.state_dict`` makes a step where
    ``optimizer.state`` is empty, to have state: here it makes none.

    Args:
        params: of the optimizer, by path.
        owned: by path, what stands in the groups of ``optim``: the parameter, or parts of it.
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
                f"this optimizer does not have the parameter {brief(param)}; ask for one of its "
                "param_groups"
            )
        return self._by_path.get(self._paths[param], ())

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        """Return the entries of a parameter; those of several ranges are joined in new memory.

        Raises:
            KeyError: the optimizer does not have the parameter.
        """
        known = self._optim.state
        found = [known[one] for one in self._owned(param) if one in known]
        if len(found) < 2:
            return found[0] if found else {}
        return {name: _joined([one[name] for one in found]) for name in found[0]}

    def __setitem__(self, param: Tensor, entries: Mapping[str, Any]) -> None:
        """Give a parameter other entries; their values are copied at the next step.

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


def _joined(parts: list[Any]) -> Any:
    """Return the values of several ranges one after another; a step count is that of the first."""
    if isinstance(parts[0], Tensor) and parts[0].dim():
        return torch.cat([one.reshape(-1) for one in parts])
    return parts[0]
