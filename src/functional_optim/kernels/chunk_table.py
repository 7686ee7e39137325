"""A table of chunks: pointers to where their tensors begin, for kernels that are written in C."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

POINTER = ctypes.c_void_p


class Table(NamedTuple):
    """Leaves as a loop takes them: pointers to where their tensors begin."""

    elements: int
    """Of all of them."""
    leaves: int
    lengths: Any
    """The elements of each."""
    addresses: Any
    """Of each leaf, where its tensors begin, the parameter first."""
    gradients: Any = None
    """Where the gradient of each begins (pointers, or the bytes of such), if it is not where
    ``addresses`` say."""

    @classmethod
    def of(cls, lengths: Sequence[int], addresses: Sequence[int]) -> "Table":
        """The table of some leaves."""
        return cls(
            sum(lengths),
            len(lengths),
            (ctypes.c_long * len(lengths))(*lengths),
            (POINTER * len(addresses))(*addresses),
        )

    def by(self, gradients: Sequence[int] | bytes) -> "Table":
        """The same leaves with gradients that lie elsewhere."""
        where: Any = gradients
        if not isinstance(gradients, bytes):
            where = (POINTER * len(gradients))(*gradients)
        return Table(self.elements, self.leaves, self.lengths, self.addresses, where)

    @classmethod
    def of_tensors(cls, leaves: Sequence[Sequence[Tensor]]) -> "Table":
        """The table of leaves, of which each is its tensors, the parameter first."""
        lengths = [tensors[0].numel() for tensors in leaves]
        return cls.of(lengths, [one.data_ptr() for tensors in leaves for one in tensors])
