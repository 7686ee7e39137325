"""Pairs of ranks: drawn at random, the same on all ranks, and means over each of them."""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hooks.averaging.rank_means import DIGEST_BYTES, coalesced, digest_of
from sharding.transport.groups import backends, has_messages
from sharding.transport.messages import CPU, Direction, MessageTags, launched, receive
from sharding.transport.peers import GroupRank, named


def partners(size: int, number: int, seed: int = 0) -> list[int | None]:
    """Return the partners in one of many rounds, among the ranks of a group.

    Ranks are put in a random order, and those at places 0 and 1, 2 and 3, ... of it are pairs; of
    an odd number of ranks, the last has none. The order depends on the arguments only, so that all
    ranks that call this have the same pairs.

    Args:
        size: how many ranks the group has.
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
    chance = torch.Generator().manual_seed(int.from_bytes(words, "big"))
    order = torch.randperm(size, generator=chance).tolist()
    found: list[int | None] = [None] * size
    for one, other in zip(order[::2], order[1::2], strict=False):  # an odd one out stays alone
        found[one], found[other] = other, one
    return found


class RankPairs:
    """Takes means over pairs of ranks, of which the other ranks know nothing.

    Tensors of one dtype travel as one flat message, through the memory of the CPU. A few bytes
    before it say what is to come, so that partners that have other tensors find that out.

    All ranks of a group must make theirs in the same order, and take part in every round.

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
                f"{backends(group)}; init_process_group('cpu:gloo,cuda:nccl') gives a group both"
            )
        self.bytes_sent = 0
        """The bytes of tensors that this rank has sent, headers not counted."""
        self._group = group
        self._numbers = MessageTags(group)

    @torch.no_grad()
    def means(
        self, partners: Sequence[int | None], tensors: Sequence[Tensor], *, mark: object = None
    ) -> list[Tensor]:
        """The mean of each tensor over this rank and its partner; one's own where there is none.

        Args:
            partners: of each rank of the group, as :func:`partners` has it.
            tensors: as many, of the same shapes and dtypes, on both.
            mark: anything else that both must have in common, by its ``repr``.

        Raises:
            ValueError: the partner brought other tensors, or another mark.
            TransportError: the partner did not come.
        """
        number, tag = self._numbers.next()
        partner = partners[self._group.rank()]
        if partner is None:
            return list(tensors)
        what = f"swap {number}"
        own = [tensor.detach().to(CPU) for tensor in tensors]
        digest = torch.tensor(list(digest_of(own, mark)), dtype=torch.uint8)
        told = torch.empty(DIGEST_BYTES, dtype=torch.uint8)
        self._swap(what, partner, tag, digest, told)
        if not torch.equal(told, digest):
            raise ValueError(
                f"{named(self._group, [GroupRank(partner)])} brought other tensors to swap than "
                "this rank; both must have the same parameters, of the same shapes and dtypes, of "
                "DTensors the same shards, the same settings, and have made as many steps"
            )
        given, (taken, views) = coalesced(own)[0], coalesced(own)
        for outgoing, incoming in zip(given, taken, strict=True):
            self._swap(what, partner, tag, outgoing.view(torch.uint8), incoming.view(torch.uint8))
            self.bytes_sent += outgoing.nbytes
        others = [view.to(tensor.device) for view, tensor in zip(views, tensors, strict=True)]
        return [(one + other) / 2 for one, other in zip(tensors, others, strict=True)]

    def _swap(self, what: str, partner: int, tag: int, given: Tensor, taken: Tensor) -> None:
        messages = [
            launched(what, self._group, direction, partner, message, message.numel(), tag)
            for direction, message in ((Direction.FROM, taken), (Direction.TO, given))
        ]
        receive(what, self._group, messages, patient=True)
