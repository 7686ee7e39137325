"""Exchange of matrices with their owners: one all_to_all in each direction for all matrices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from functional_optim.engine.tensors import to_local
from sharding.matrices.shard_group import ShardGroup
from sharding.transport.packed import Form, PackedTensors, begin_all_to_all, copy_pairs
from sharding.transport.protocol import Range

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PendingRows = Callable[[], tuple[list[bytes], dict[str, Tensor]]]
"""Function that waits for the rows that owners are sending to this rank. It returns the header of
each rank, and new tensors with the rows, by path."""


@dataclass(frozen=True, eq=False)
class OwnedMatrix:
    """Sharded parameter that its owner steps as a whole."""

    path: str
    param: "DTensor"
    owner: int
    """The rank of the owner in the group."""
    rows: Sequence[Range]
    """The rows of each rank."""
    whole: Tensor | None = None
    """The whole parameter, on the owner."""
    grad: Tensor | None = None
    """The whole gradient, on the owner."""

    def form_at(self, rank: int) -> Form:
        """Return the form of the rows that a rank holds."""
        start, stop = self.rows[rank]
        return (stop - start, *self.param.shape[1:]), self.param.dtype

    def rows_of(self, whole: Tensor, rank: int) -> Tensor:
        """Return the rows of a whole tensor that a rank holds, as a view."""
        start, stop = self.rows[rank]
        return whole[start:stop]


class RowExchange:
    """Exchange of the rows of matrices between the ranks and the owners. Collective.

    Args:
        shards: the ranks.
        matrices: the same on all ranks, in the same order. The owner has allocated each matrix.
    """

    def __init__(self, shards: ShardGroup, matrices: Sequence[OwnedMatrix]) -> None:
        self._shards, self.matrices = shards, matrices
        ranks, rank = range(shards.size), shards.rank
        self._by_owner = [[one for one in matrices if one.owner == k] for k in ranks]
        mine = self._by_owner[rank]
        self._gathered = (
            [_param_and_grad_forms(own, rank) for own in self._by_owner],
            [_param_and_grad_forms(mine, k) for k in ranks],
        )
        """For a gather, the forms that are sent to each rank, and received from each rank."""
        self._scattered = (
            [[one.form_at(k) for one in mine] for k in ranks],
            [[one.form_at(rank) for one in own] for own in self._by_owner],
        )
        """For a scatter, the forms that are sent to each rank, and received from each rank."""
        self._device = to_local(shards.example.detach()).device

    def gather(self, header: bytes, grads: Mapping[str, Tensor]) -> list[bytes]:
        """Gather parameters and gradients in the memory of their owners, and return all headers.

        Parameters are sent, too, because a caller may have written to them since the last step.

        Args:
            header: the message to all other ranks, of :data:`HEADER` bytes.
            grads: the local rows of gradients, by path; missing gradients are not sent.
        """
        sent, found = (PackedTensors(forms, self._device) for forms in self._gathered)
        rows: list[Tensor | None] = []
        for one in (one for own in self._by_owner for one in own):
            rows += [to_local(one.param.detach()), grads.get(one.path)]
        sent.write(header, rows)
        self._begin(found, sent, "gather matrices")()
        mine, pairs = self._by_owner[self._shards.rank], []
        wholes = [whole for one in mine for whole in ((one, one.whole), (one, one.grad))]
        for sender, views in enumerate(found.tensors):
            for (one, whole), view in zip(wholes, views, strict=True):
                assert whole is not None, "the owner has memory for it"
                pairs.append((one.rows_of(whole, sender), view))
        copy_pairs(pairs)
        return found.read_headers()

    def scatter(self, header: bytes, value_of: Callable[[OwnedMatrix], Tensor]) -> PendingRows:
        """Start to send the rows of matrices from owners to all ranks.

        ``value_of`` returns the whole tensor to send for a matrix that this rank owns.
        """
        values = [(one, value_of(one)) for one in self._by_owner[self._shards.rank]]
        sent, found = (PackedTensors(forms, self._device) for forms in self._scattered)
        size = self._shards.size
        sent.write(header, [one.rows_of(v, k) for k in range(size) for one, v in values])
        wait = self._begin(found, sent, "scatter matrices")

        def receive() -> tuple[list[bytes], dict[str, Tensor]]:
            wait()
            paths = [one.path for own in self._by_owner for one in own]
            rows = [view for views in found.tensors for view in views]
            return found.read_headers(), dict(zip(paths, rows, strict=True))

        return receive

    def _begin(self, found: PackedTensors, sent: PackedTensors, what: str) -> Callable[[], None]:
        """Start an exchange, and return a function that waits for it."""
        return begin_all_to_all(self._shards.group, found, sent, what)


def _param_and_grad_forms(matrices: Sequence[OwnedMatrix], rank: int) -> list[Form]:
    """Return the forms of the rows of a rank, of each parameter and its gradient."""
    return [one.form_at(rank) for one in matrices for _ in range(2)]
