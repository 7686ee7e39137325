"""Division of a parameter into matrices that are stepped one by one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class MatrixBlocks:
    """Division of a parameter into matrices: attention heads, fused projections, experts.

    A parameter of shape ``(*batch, rows, *columns)`` is a batch of matrices. Each matrix is divided
    between rows. Every block is stepped like a separate parameter, with its own orthogonal factor,
    preconditioner or norm. The arguments are the options of :func:`functional_optim.muon`.

    Args:
        row_blocks: number of equal blocks of rows, such as attention heads.
        split_sizes: number of rows of each block if they differ, such as those of Q, K and V.
        batch_axes: number of leading axes that are a batch of matrices, such as experts.
        column_axes: number of last axes that are the columns of a matrix.

    Raises:
        TypeError: an argument is not a whole number.
        ValueError: an argument is below 1 (``batch_axes``: below 0), or both ``row_blocks`` and
            ``split_sizes`` are given.

    Example::

        >>> heads = MatrixBlocks(row_blocks=2)
        >>> heads.shapes((6, 4))
        [(3, 4), (3, 4)]
        >>> MatrixBlocks(split_sizes=(4, 1, 1)).bounds((6, 4))
        [0, 16, 20, 24]
        >>> MatrixBlocks(batch_axes=1).shapes((8, 6, 4))[0]
        (6, 4)
    """

    row_blocks: int = 1
    split_sizes: tuple[int, ...] = ()
    batch_axes: int = 0
    column_axes: int = 1

    def __post_init__(self) -> None:
        """Check the arguments."""
        object.__setattr__(self, "split_sizes", tuple(self.split_sizes))
        counts = [("row_blocks", self.row_blocks, 1), ("batch_axes", self.batch_axes, 0)]
        counts += [("column_axes", self.column_axes, 1)]
        counts += [("split_sizes", size, 1) for size in self.split_sizes]
        for name, value, least in counts:
            if type(value) is not int:
                raise TypeError(f"{name} of MatrixBlocks must be whole numbers, got {value!r}")
            if value < least:
                raise ValueError(f"{name} of MatrixBlocks must be >= {least}, got {value}")
        if self.split_sizes and self.row_blocks != 1:
            raise ValueError(
                f"row_blocks must be 1 if split_sizes are given, got {self.row_blocks} and "
                f"{self.split_sizes}"
            )

    @property
    def has_parts(self) -> bool:
        """Return True if a parameter may have more than one block."""
        return self.row_blocks > 1 or len(self.split_sizes) > 1 or self.batch_axes > 0

    def check(self, what: str, shape: Sequence[int]) -> None:
        """Check that these blocks divide a shape.

        Args:
            what: the parameter or the rule, for the error.
            shape: of the parameter.

        Raises:
            ValueError: a wrong number of dimensions, or rows that the blocks do not divide.
        """
        wanted = self.batch_axes + 1 + self.column_axes
        if len(shape) != wanted:
            raise ValueError(
                f"{what}: with batch_axes={self.batch_axes} and column_axes={self.column_axes} a "
                f"parameter must have {wanted} dimensions, got the shape {tuple(shape)}"
            )
        rows, sizes = shape[self.batch_axes], self.split_sizes
        if rows % self.row_blocks or (sizes and sum(sizes) != rows):
            split = f"split_sizes={sizes}" if sizes else f"row_blocks={self.row_blocks}"
            raise ValueError(
                f"{what}: {split} must divide the {rows} rows of a parameter of shape "
                f"{tuple(shape)}"
            )

    def shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the shape ``(rows, *columns)`` of each block of a parameter, in order.

        Raises:
            ValueError: as for :meth:`check`.
        """
        self.check("blocks", shape)
        columns = tuple(shape[self.batch_axes + 1 :])
        rows = shape[self.batch_axes]
        sizes = self.split_sizes or (rows // self.row_blocks,) * self.row_blocks
        return [(size, *columns) for size in sizes] * math.prod(shape[: self.batch_axes])

    def bounds(self, shape: Sequence[int]) -> list[int]:
        """Return the first element of each block of the flattened parameter, and the end.

        Raises:
            ValueError: as for :meth:`check`.
        """
        return [0, *accumulate(math.prod(one) for one in self.shapes(shape))]

    def split(self, param: Tensor) -> list[Tensor]:
        """Return the blocks of a contiguous tensor, as views.

        Raises:
            ValueError: as for :meth:`check`.
        """
        shapes = self.shapes(param.shape)
        flat = param.view(-1).split([math.prod(one) for one in shapes])
        return [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]


@dataclass(frozen=True)
class BlockOptions:
    """Declaration of how hyper-parameters divide a parameter into blocks.

    Args:
        of: ``of(hyper)`` returns the blocks.
        unsplit: ``unsplit(hyper)`` returns the hyper-parameters for one block as a parameter.
    """

    of: Callable[[Any], MatrixBlocks]
    unsplit: Callable[[Any], Any]
