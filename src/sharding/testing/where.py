"""Position of a rank: a message of the running function for those who wait for it."""

from collections.abc import Callable

_TELL: list[Callable[[str], object]] = []


def at(place: str) -> None:
    """Say where this rank is: it goes on, so it does not hang; and if it hangs, it hangs here.

    Outside a :class:`~sharding.testing.RankPool` it does nothing.
    """
    for tell in _TELL:
        tell(place)


def tell_by(tell: Callable[[str], object]) -> None:
    """From now on, what this process says goes there."""
    _TELL[:] = [tell]
