"""Protocol of a transport: two operations on a flat buffer that every rank cuts alike.

**Who guarantees the order.** As with every collective, all ranks of a group must launch the same
operations of a transport in the same order. The caller guarantees it. A DDP communication hook gets
it from DDP, which hands buckets to its hook in the same order on all ranks, as long as the hook
launches at once and not from a callback. What is launched from elsewhere (parameters that are
gathered when a step happens to be done) belongs to a transport over a group of its own, made by
:func:`~sharding.transport.gather_group`: then only its own order counts.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

Range = tuple[int, int]
"""The elements ``[start, stop)`` of a flat buffer; empty where both are equal."""


class TransportError(RuntimeError):
    """An operation that the other ranks did not complete; its cause is torch's error."""


class Work(Protocol):
    """An operation that was launched. Until it is done, its buffer must be left alone."""

    def wait(self) -> None:
        """Return when the operation is done.

        On an accelerator: when it is queued before whatever the current stream does next.

        Raises:
            TransportError: another rank died or did not come within the group's timeout.
        """


class Transport(Protocol):
    """Moves gradients to the ranks that own them, and parameters from the ranks that own them.

    ``ranges`` has one range per rank of the group, in the order of group ranks, and is the same on
    all ranks. Ranges may be of any size, also empty, and need not cover the buffer; they must not
    overlap.
    """

    group: ProcessGroup
    """The process group."""
    rank: int
    """This process's rank in the group."""
    size: int
    """How many ranks the group has."""
    rank_ordered: bool
    """Whether sums are in rank order, so that their bits depend on nothing else."""

    @property
    def bytes_sent(self) -> int:
        """The bytes of tensors that this rank has handed to other ranks, headers not counted."""

    def reduce_scatter(
        self, flat: Tensor, ranges: Sequence[Range], *, average: bool = False
    ) -> Work:
        """Sum the ranks' buffers, each rank its own range, in place.

        With ``g_q`` the buffer of rank ``q`` in a group of ``W`` ranks, rank ``r`` gets

            flat[range_r] = (((g_0 + g_1) + g_2) + ...)[range_r]

        in this order where :attr:`rank_ordered`, bit for bit what ``functools.reduce(add, ...)``
        over those buffers gives, whatever the sizes and the timing. float16 and bfloat16 are added
        in float32, in the same order, and rounded once, at the end.

        Args:
            flat: a contiguous buffer of one dimension, as long on every rank, of float32, float64,
                bfloat16, float16, or complex (summed as real numbers). What is in the range of
                another rank stays this rank's own (with ``average``, divided or not).
            ranges: which rank owns what.
            average: the mean. As torch's ``allreduce_hook`` does it: every rank's numbers are
                divided by ``W``, in the buffer's dtype, *before* anything is added.

        Raises:
            TypeError: a buffer of another dtype.
            ValueError: a buffer or ranges of another form.
            TransportError: another rank died; otherwise ``wait()`` says so.
        """

    def all_gather(self, flat: Tensor, ranges: Sequence[Range]) -> Work:
        """Give every rank's own range to all others, in place, bit for bit.

        Args:
            flat: as above, but of any dtype.
            ranges: which rank owns what.

        Raises:
            ValueError: a buffer or ranges of another form.
            TransportError: another rank died; otherwise ``wait()`` says so.
        """
