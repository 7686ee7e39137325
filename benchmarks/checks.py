"""Checks of a promise: figures and their limits."""

from collections.abc import Iterable
from typing import NamedTuple


class Check(NamedTuple):
    """Figure of a target."""

    where: str
    value: float
    limit: float
    shown: str

    @property
    def met(self) -> bool:
        """Return True if the figure is within the limit."""
        return self.value <= self.limit


class Target(NamedTuple):
    """Promise, and every figure that decides about it."""

    promise: str
    checks: tuple[Check, ...]
    missing: tuple[str, ...]
    """Names of figures that should have been measured and were not. Then the promise is not
    kept."""

    @property
    def verdict(self) -> str:
        """Return "met", "MISSED" or "not measured"."""
        if not self.checks and not self.missing:
            return "not measured"
        return "met" if not self.missing and all(one.met for one in self.checks) else "**MISSED**"

    @property
    def worst(self) -> Check | None:
        """Return the figure that is nearest to its limit, or farthest beyond it."""
        return max(self.checks, key=lambda one: one.value / one.limit, default=None)


def target(promise: str, found: Iterable[Check | str]) -> Target:
    """Return a promise with its figures, and with the names of those that are missing."""
    every = list(found)
    checks = tuple(one for one in every if isinstance(one, Check))
    return Target(promise, checks, tuple(one for one in every if isinstance(one, str)))
