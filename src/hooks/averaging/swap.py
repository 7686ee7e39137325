"""A swap of tensors between two ranks of a group, of which the others know nothing."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hooks.averaging.group_mean import FORM_BYTES, form_of, packed
from sharding.transport.groups import backends, has_messages
from sharding.transport.messages import CPU, Direction, Numbers, launched, receive
from sharding.transport.peers import GroupRank, named


class Swap:
    """Gives tensors to a partner, and takes the partner's.

    Tensors of one dtype travel as one flat message, through the memory of the CPU. A few bytes
    before it say what is to come, so that partners that have other tensors find that out.

    All ranks of a group must make theirs in the same order, and count rounds alike: those without a
    partner call :meth:`skip`.

    Args:
        group: the process group; for CPU tensors, its backend must be gloo.

    Raises:
        ValueError: a group without gloo.

    Example::

        >>> from sharding.transport.local import LocalWorld
        >>> def swapped(group):
        ...     own = torch.tensor([1.0 + group.rank()])
        ...     return Swap(group).with_partner(1 - group.rank(), [own])
        >>> LocalWorld(2).run(swapped)
        [[tensor([2.])], [tensor([1.])]]
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
        self._numbers = Numbers(group)

    def skip(self) -> None:
        """Stay alone in this round."""
        self._numbers.next()

    def means(
        self, partners: Sequence[int | None], tensors: Sequence[Tensor], *, mark: object = None
    ) -> list[Tensor]:
        """The mean of each tensor over this rank and its partner; one's own where there is none.

        Args:
            partners: of each rank of the group, as :func:`~hooks.averaging.pairs.partners` has it.
            tensors: as :meth:`with_partner`'s, and ``mark``.
            mark: see there.

        Raises:
            ValueError, TransportError: as :meth:`with_partner`.
        """
        partner = partners[self._group.rank()]
        if partner is None:
            self.skip()
            return list(tensors)
        others = self.with_partner(partner, tensors, mark=mark)
        return [(one + other) / 2 for one, other in zip(tensors, others, strict=True)]

    @torch.no_grad()
    def with_partner(
        self, partner: int, tensors: Sequence[Tensor], *, mark: object = None
    ) -> list[Tensor]:
        """The partner's tensors, for copies of one's own.

        Args:
            partner: a group rank, which calls this too, with this rank.
            tensors: as many, of the same shapes and dtypes, on both.
            mark: anything else that both must have in common, by its ``repr``.

        Returns:
            Tensors of the same shapes and dtypes, on the same devices.

        Raises:
            ValueError: the partner brought other tensors, or another mark.
            TransportError: the partner did not come.
        """
        number, tag = self._numbers.next()
        what = f"swap {number}"
        own = [tensor.detach().to(CPU) for tensor in tensors]
        form = torch.tensor(list(form_of(own, mark)), dtype=torch.uint8)
        told = torch.empty(FORM_BYTES, dtype=torch.uint8)
        self._swap(what, partner, tag, form, told)
        if not torch.equal(told, form):
            raise ValueError(
                f"{named(self._group, [GroupRank(partner)])} brought other tensors to swap than "
                "this rank; both must have the same parameters, of the same shapes and dtypes, "
                "the same settings, and have made as many steps"
            )
        given, (taken, views) = packed(own)[0], packed(own)
        for outgoing, incoming in zip(given, taken, strict=True):
            self._swap(what, partner, tag, outgoing.view(torch.uint8), incoming.view(torch.uint8))
            self.bytes_sent += outgoing.nbytes
        return [view.to(tensor.device) for view, tensor in zip(views, tensors, strict=True)]

    def _swap(self, what: str, partner: int, tag: int, given: Tensor, taken: Tensor) -> None:
        messages = [
            launched(what, self._group, direction, partner, piece, piece.numel(), tag)
            for direction, piece in ((Direction.FROM, taken), (Direction.TO, given))
        ]
        receive(what, self._group, messages, patient=True)
