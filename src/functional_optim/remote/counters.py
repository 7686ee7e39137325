"""Counters of a worker."""

from collections.abc import Mapping
from typing import NamedTuple


class Counters(NamedTuple):
    """Counters of a worker for one optimizer.

    Example::

        >>> made = Counters(3, 0, 12, 0, 3, 12, 0, 0, {0: 1, 2: 2})
        >>> made.max_staleness
        2
        >>> round(made.mean_staleness, 2)
        1.33
    """

    steps: int
    """Steps so far."""
    waits: int
    """Steps that had to wait for a step of any optimizer, or for a reader."""
    gradient_bytes: int
    """Bytes of all gradients of steps."""
    refused: int
    """Steps whose gradients were too old."""
    reads: int
    """Snapshots that were read."""
    read_bytes: int
    """Bytes of all parameters that were read."""
    copied_bytes: int
    """Bytes of parameters that were copied, for a reader, or before a write to a parameter with
    readers."""
    read_waits: int
    """Snapshots that had to wait for slower trainers; the same number for all workers."""
    staleness: Mapping[int, int]
    """The number of steps with gradients of each age. The age is the largest number of steps that a
    parameter has made since it was read. Steps with gradients of unknown age are not counted."""

    @property
    def max_staleness(self) -> int:
        """Return the age of the oldest gradients; 0 if no age is known."""
        return max(self.staleness, default=0)

    @property
    def mean_staleness(self) -> float:
        """Return the mean age of gradients; 0 if no age is known."""
        known = sum(self.staleness.values())
        return sum(age * steps for age, steps in self.staleness.items()) / known if known else 0.0
