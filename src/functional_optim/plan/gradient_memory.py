"""The memory that tensors are parts of, and what is apart from it."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from torch import Tensor


class Spans:
    """The memory that tensors are parts of.

    Args:
        tensors: whose memory it is.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = (tensor.untyped_storage() for tensor in tensors)
        spans = {(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages}
        self._begins: list[int] = []
        self._ends: list[int] = []
        for begin, end in sorted(spans):
            if self._ends and begin <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._begins.append(begin)
                self._ends.append(end)

    def are_clear_of(self, tensors: Sequence[Tensor], starts: Sequence[int]) -> bool:
        """Return True if tensors without gaps share no memory with these, whoever made them.

        Args:
            tensors: that are looked at.
            starts: where each of them begins.
        """
        for tensor, start in zip(tensors, starts, strict=True):
            end = start + tensor.numel() * tensor.element_size()
            last = bisect_left(self._begins, end) - 1  # of those that begin before its end
            if last >= 0 and self._ends[last] > start:
                return False
        return True
