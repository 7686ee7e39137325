"""The step counts of leaves that are stepped together."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor


class Counts:
    """Step counts that are read and advanced as one, where they lie :func:`beside` each other.

    Args:
        steps: 0-d int64 tensors, one for each leaf.

    Example::

        >>> counts = Counts(beside([torch.tensor(3), torch.tensor(3)]))
        >>> counts.advance()
        >>> counts.common()
        4
    """

    def __init__(self, steps: Sequence[Tensor]) -> None:
        self._steps = list(steps)
        self._whole = _as_one(self._steps)

    def common(self) -> int | None:
        """How many steps each leaf has made; None where some have made more than others."""
        whole = self._whole
        made: list[int] = list(map(int, self._steps)) if whole is None else whole.tolist()
        return made[0] if made.count(made[0]) == len(made) else None

    def advance(self) -> None:
        """Each leaf has made one more step."""
        if self._whole is None:
            torch._foreach_add_(self._steps, 1)
        else:
            self._whole.add_(1)


def beside(steps: Sequence[Tensor]) -> list[Tensor]:
    """The same step counts, one beside the other in one tensor."""
    return list(torch.stack(list(steps)).unbind()) if steps else []


def is_count(value: Any) -> TypeGuard[Tensor]:
    """Whether a value is a step count as state holds one."""
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.int64
        and value.dim() == 0
        and value.is_cpu
    )


def _as_one(steps: Sequence[Tensor]) -> Tensor | None:
    """The tensor in which all of these, and nothing else, lie in their order."""
    first = steps[0]
    storage = first.untyped_storage()
    size = first.element_size()
    starts = range(first.data_ptr(), first.data_ptr() + size * len(steps), size)
    same = all(one.untyped_storage().data_ptr() == storage.data_ptr() for one in steps)
    if not same or [one.data_ptr() for one in steps] != list(starts):
        return None
    return first.detach().as_strided((len(steps),), (1,))
