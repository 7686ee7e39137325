"""Protocol of a transport: two collectives on a flat buffer, with the same ranges on all ranks.

**Order of operations.** All ranks of a group must launch the operations of a transport in the same
order. The caller guarantees this. DDP calls a communication hook in the same bucket order on all
ranks, so a hook must launch its operations at once, and not in a callback. Operations that are
launched elsewhere, such as gathers of parameters at the end of a step, need a transport over a
second group from :func:`~sharding.transport.gather_group`. Their order is then independent.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

Range = tuple[int, int]
"""Elements ``[start, stop)`` of a flat buffer. The range is empty if both are equal."""


class TransportError(RuntimeError):
    """Error of an operation that other ranks did not complete; its cause is torch's error."""


class Work(Protocol):
    """Handle of a launched operation. Do not use the buffer until the operation is done."""

    def wait(self) -> None:
        """Return when the operation is done; on an accelerator, let the current stream wait for it.

        Raises:
            TransportError: another rank died or did not come within the group's timeout.
        """


class Transport(Protocol):
    """Moves gradients to the ranks that own them, and parameters from the ranks that own them.

    ``ranges`` has one range per rank of the group, in the order of group ranks, and is the same on
    all ranks. Ranges can have any size, also 0. They must not overlap, and need not cover the
    buffer.
    """

    group: ProcessGroup
    """The process group."""
    rank: int
    """This process's rank in the group."""
    size: int
    """The number of ranks of the group."""
    rank_ordered: bool
    """True if sums are in rank order, so that their bits depend on the addends only."""

    @property
    def bytes_sent(self) -> int:
        """The bytes of tensors that this rank has sent to other ranks, without headers."""

    def reduce_scatter(
        self, flat: Tensor, ranges: Sequence[Range], *, average: bool = False
    ) -> Work:
        """Sum the buffers of all ranks, in place. Each rank gets the sum of its own range.

        With ``g_q`` the buffer of rank ``q`` in a group of ``W`` ranks, rank ``r`` gets

            flat[range_r] = (((g_0 + g_1) + g_2) + ...)[range_r]

        If :attr:`rank_ordered`, terms are added in this order. The result then equals that of
        ``functools.reduce(add, ...)`` over these buffers bit for bit, for all sizes and timings.
        float16 and bfloat16 are added in float32, in the same order, and rounded once, at the end.

        Args:
            flat: a contiguous buffer of one dimension, of the same length on all ranks. Its dtype
                is float32, float64, bfloat16, float16, or complex (summed as real numbers). The
                ranges of other ranks keep this rank's values; with ``average`` they may be divided.
            ranges: the range of each rank.
            average: True for the mean. As in torch's ``allreduce_hook``, every term is divided by
                ``W`` in the buffer's dtype *before* the addition.

        Raises:
            TypeError: a buffer of another dtype.
            ValueError: an invalid buffer or invalid ranges.
            TransportError: another rank is known to be dead. ``wait()`` reports later deaths.
        """

    def all_gather(self, flat: Tensor, ranges: Sequence[Range]) -> Work:
        """Copy the own range of every rank to all other ranks, in place, bit for bit.

        Args:
            flat: a contiguous buffer of one dimension, of the same length on all ranks, of any
                dtype.
            ranges: the range of each rank.

        Raises:
            ValueError: an invalid buffer or invalid ranges.
            TransportError: another rank is known to be dead. ``wait()`` reports later deaths.
        """
