"""The step counts of leaves that are stepped together."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from functional_optim._torch import foreach_add_, version_of
from functional_optim.native import LOOPS


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
        self._places: Tensor | None = None
        self._ones: Tensor | None = None  # one for each place
        self._is_watched = False
        self._seen = -1
        self._made: int | None = None

    @classmethod
    def within(cls, whole: Tensor, places: Sequence[int]) -> "Counts":
        """Some of the counts in a tensor; they are read again only where it was written to.

        Args:
            whole: 1-D; all that writes to counts writes to it, or to a view of it.
            places: of those in it.
        """
        counts = cls([])
        counts._whole, counts._is_watched = whole, True
        if len(places) < whole.numel():
            counts._places = torch.tensor(places, device="cpu")
            counts._ones = torch.ones_like(counts._places)
        return counts

    def common(self) -> int | None:
        """Return the step count of the leaves; None if they differ."""
        whole = self._whole
        if whole is None:
            return self._common_apart()
        if self._is_watched and self._seen == version_of(whole):
            return self._made
        made = whole.tolist()
        if self._places is not None:
            made = [made[k] for k in self._places.tolist()]
        self._made = _common(made)
        if self._is_watched:
            self._seen = version_of(whole)
        return self._made

    def _common_apart(self) -> int | None:
        """Return the common step count of counts that are no neighbours."""
        loops = LOOPS.loaded or LOOPS.get(len(self._steps))
        found: int | bool | None = False if loops is None else loops.common(self._steps)
        if found is not False:
            return found
        return _common(list(map(int, self._steps)))

    def advance(self, by: int = 1) -> None:
        """Each leaf has made one more step, or so many."""
        if by != 1:
            self._add(by)
            return
        if self._whole is None:
            loops = LOOPS.loaded or LOOPS.get(len(self._steps))
            if loops is None or not loops.advance_each(self._steps):
                foreach_add_(self._steps, 1)
            return
        known = self._is_watched and self._seen == version_of(self._whole)
        if self._places is None or self._ones is None:
            loops = LOOPS.loaded or LOOPS.get(
                1
            )  # an operation of torch takes as long as a small step
            if loops is None or not loops.advance(self._whole):
                self._whole.add_(1)
        else:
            self._whole.index_add_(0, self._places, self._ones)
        if known and self._made is not None:
            self._made, self._seen = self._made + 1, version_of(self._whole)

    def _add(self, number: int) -> None:
        if self._whole is None:
            foreach_add_(self._steps, number)
        elif self._places is None or self._ones is None:
            self._whole.add_(number)
        else:
            self._whole.index_add_(0, self._places, self._ones, alpha=number)


def beside(steps: Sequence[Tensor]) -> list[Tensor]:
    """Copy step counts into one tensor, as neighbours."""
    return list(torch.stack(list(steps)).unbind()) if steps else []


def is_count(value: Any) -> TypeGuard[Tensor]:
    """Return True if a value is a step count as state holds one."""
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.int64
        and value.dim() == 0
        and value.is_cpu
    )


def _common(made: list[int]) -> int | None:
    """The number that all of these are."""
    return made[0] if made.count(made[0]) == len(made) else None


def _as_one(steps: Sequence[Tensor]) -> Tensor | None:
    """The tensor in which all of these, and nothing else, lie in their order."""
    if not steps:
        return None
    first = steps[0]
    storage = first.untyped_storage()
    size = first.element_size()
    starts = range(first.data_ptr(), first.data_ptr() + size * len(steps), size)
    same = all(one.untyped_storage().data_ptr() == storage.data_ptr() for one in steps)
    if not same or [one.data_ptr() for one in steps] != list(starts):
        return None
    return first.detach().as_strided((len(steps),), (1,))
