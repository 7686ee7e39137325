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
    """Made so far."""
    waits: int
    """Steps that had to wait until another one, of whichever optimizer, was made, or until someone
    had read."""
    gradient_bytes: int
    """Of all gradients that were stepped."""
    refused: int
    """Steps whose gradients were too old."""
    reads: int
    """Snapshots."""
    read_bytes: int
    """Of all parameters that were read."""
    copied_bytes: int
    """Of parameters that were copied, for a reader or to leave a version to its readers."""
    read_waits: int
    """Snapshots that had to wait for slower trainers; the same for all workers."""
    staleness: Mapping[int, int]
    """How many of the steps were made by gradients of each age. The age is the most steps that a
    parameter that was read has made since; steps of which nobody knows it are not among them."""

    @property
    def max_staleness(self) -> int:
        """The age of the oldest gradients; 0 if there were none of a known age."""
        return max(self.staleness, default=0)

    @property
    def mean_staleness(self) -> float:
        """The mean age of gradients; 0 if there were none of a known age."""
        known = sum(self.staleness.values())
        return sum(age * steps for age, steps in self.staleness.items()) / known if known else 0.0
