"""Pairs of ranks, drawn at random but equal on all ranks, and means over each pair."""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hooks.averaging.rank_means import DIGEST_BYTES, digest_of, flatten_copies
from sharding.transport.groups import GroupRank, backends_of, format_ranks, has_messages
from sharding.transport.messages import CPU, Direction, MessageTags, launch_message, wait_messages


def partners(size: int, number: int, seed: int = 0) -> list[int | None]:
    """Return the partner of each rank in a round.

    Ranks are shuffled, and those at positions 0 and 1, 2 and 3, ... are pairs; with an odd number
    of ranks, the last has no partner. The order depends on the arguments only, so all ranks compute
    the same pairs.

    Args:
        size: number of ranks of the group.
        number: of the round.
        seed: of all rounds.

    Returns:
        For each rank its partner's group rank, or None.

    Example::

        >>> partners(2, number=1)
        [1, 0]
        >>> partners(5, number=1).count(None)
        1
    """
    words = hashlib.sha256(f"{seed}, {number}".encode()).digest()[:8]
    generator = torch.Generator().manual_seed(int.from_bytes(words, "big"))
    order = torch.randperm(size, generator=generator).tolist()
    found: list[int | None] = [None] * size
    for one, other in zip(order[::2], order[1::2], strict=False):  # odd sizes leave one
        found[one], found[other] = other, one
    return found


class RankPairs:
    """Means over pairs of ranks, without messages to other ranks.

    Tensors of one dtype are sent as one flat message, through CPU memory. A digest is sent first,
    so that partners with different tensors raise an error.

    All ranks of a group must create their objects in the same order, and take part in every round.

    Args:
        group: the process group; for CPU tensors, its backend must be gloo.

    Raises:
        ValueError: a group without gloo.

    Example::

        >>> from sharding.transport.local import LocalWorld
        >>> def mean(group):
        ...     return RankPairs(group).means([1, 0], [torch.tensor([1.0 + group.rank()])])
        >>> LocalWorld(2).run(mean)
        [[tensor([1.5000])], [tensor([1.5000])]]
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        if not has_messages(group, CPU):
            raise ValueError(
                "pairs of ranks exchange messages over gloo, and this group has "
                f"{backends_of(group)}; init_process_group('cpu:gloo,cuda:nccl') gives a group both"
            )
        self.bytes_sent = 0
        """The bytes of tensors that this rank has sent, without headers."""
        self._group = group
        self._numbers = MessageTags(group)

    @torch.no_grad()
    def means(
        self, partners: Sequence[int | None], tensors: Sequence[Tensor], *, mark: object = None
    ) -> list[Tensor]:
        """Return the mean of each tensor over this rank and its partner, if there is one.

        Args:
            partners: of each rank of the group, from :func:`partners`.
            tensors: with the same shapes and dtypes on both ranks.
            mark: any object whose ``repr`` must be equal on both ranks.

        Raises:
            ValueError: the partner passed different tensors, or another mark.
            TransportError: the partner is missing.
        """
        number, tag = self._numbers.next()
        partner = partners[self._group.rank()]
        if partner is None:
            return list(tensors)
        what = f"swap {number}"
        own = [tensor.detach().to(CPU) for tensor in tensors]
        digest = torch.tensor(list(digest_of(own, mark)), dtype=torch.uint8, device=CPU)
        received = torch.empty(DIGEST_BYTES, dtype=torch.uint8, device=CPU)
        self._swap(what, partner, tag, digest, received)
        if not torch.equal(received, digest):
            raise ValueError(
                f"{format_ranks(self._group, [GroupRank(partner)])} brought other tensors to swap "
                "than this rank; both must have the same parameters, of the same shapes and "
                "dtypes, of DTensors the same shards, the same settings, and have made as many "
                "steps"
            )
        sent, (targets, views) = flatten_copies(own)[0], flatten_copies(own)
        for outgoing, incoming in zip(sent, targets, strict=True):
            self._swap(what, partner, tag, outgoing.view(torch.uint8), incoming.view(torch.uint8))
            self.bytes_sent += outgoing.nbytes
        others = [view.to(tensor.device) for view, tensor in zip(views, tensors, strict=True)]
        return [(one + other) / 2 for one, other in zip(tensors, others, strict=True)]

    def _swap(self, what: str, partner: int, tag: int, outgoing: Tensor, incoming: Tensor) -> None:
        messages = [
            launch_message(what, self._group, direction, partner, message, message.numel(), tag)
            for direction, message in ((Direction.FROM, incoming), (Direction.TO, outgoing))
        ]
        wait_messages(what, self._group, messages, patient=True)
