"""Checks that a promise is judged by: figures, and their limits."""

from collections.abc import Iterable
from typing import NamedTuple


class Check(NamedTuple):
    """One figure of a target."""

    where: str
    value: float
    limit: float
    shown: str

    @property
    def met(self) -> bool:
        """Return True if the figure is within the limit."""
        return self.value <= self.limit


class Target(NamedTuple):
    """A promise, and every figure that it is judged by."""

    promise: str
    checks: tuple[Check, ...]
    missing: tuple[str, ...]
    """What should have been measured and was not: the promise is then not kept."""

    @property
    def verdict(self) -> str:
        """met, MISSED or not measured."""
        if not self.checks and not self.missing:
            return "not measured"
        return "met" if not self.missing and all(one.met for one in self.checks) else "**MISSED**"

    @property
    def worst(self) -> Check | None:
        """The figure that comes closest to its limit, or is furthest beyond it."""
        return max(self.checks, key=lambda one: one.value / one.limit, default=None)


def target(promise: str, found: Iterable[Check | str]) -> Target:
    """A promise with its figures, and the names of those that are missing."""
    every = list(found)
    checks = tuple(one for one in every if isinstance(one, Check))
    return Target(promise, checks, tuple(one for one in every if isinstance(one, str)))
