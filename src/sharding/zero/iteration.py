"""Account of an iteration, in which everything is stepped exactly once."""

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from functional_optim.core.format import format_names

Item = TypeVar("Item", bound=Hashable)


class Iteration(Generic[Item]):
    """Items that the current iteration has stepped: names of parameters, or shards of a rank."""

    def __init__(self) -> None:
        self.is_open = False
        self._stepped: set[Item] = set()

    def begin(self, items: Iterable[Item], name_of: Callable[[Item], str] = str) -> None:
        """Begin an iteration, which is to step these items.

        Raise RuntimeError if the last iteration did not end; it is closed then.
        """
        if self.is_open:
            missing = list(map(name_of, self.close(items)))
            raise RuntimeError(
                "the last iteration ended before everything was stepped; never stepped: "
                f"{format_names(missing)}. A backward pass failed or was cut short: restart from a "
                "checkpoint, since ranks may differ now"
            )
        self.is_open, self._stepped = True, set()

    def find_repeated(self, items: Iterable[Item]) -> Item | None:
        """Return the first item that was stepped before, or occurs twice; None if there is none."""
        seen = set(self._stepped)
        for one in items:
            if one in seen:
                return one
            seen.add(one)
        return None

    def add(self, items: Iterable[Item]) -> None:
        """Record items that are stepped."""
        self._stepped.update(items)

    def close(self, items: Iterable[Item]) -> list[Item]:
        """End the iteration, and return the items that it did not step."""
        missing = [one for one in items if one not in self._stepped]
        self.is_open, self._stepped = False, set()
        return missing
