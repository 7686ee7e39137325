"""Result of a call on a rank."""

from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """Outcome of a call on one rank."""

    value: Any = None
    """What the function returned."""
    error: str | None = None
    """``Type: message`` of what it raised, or why there is no result at all."""
    traceback: str = ""
    """Of what it raised."""
    seconds: float = 0.0
    """How long the function ran."""

    def result(self) -> Any:
        """Value that the function returned.

        Raises:
            AssertionError: it did not return; says why.
        """
        assert self.error is None, f"{self.error}\n{self.traceback}"
        return self.value
