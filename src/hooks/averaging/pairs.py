"""Pairs of ranks, drawn at random: the same on all ranks, which tell one another nothing."""

import hashlib

import torch


def partners(size: int, number: int, seed: int = 0) -> list[int | None]:
    """Who is whose partner in one of many rounds, among the ranks of a group.

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
