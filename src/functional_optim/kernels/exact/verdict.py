"""Cached result of the comparison of compiled code with torch's operations."""

from collections.abc import Sequence

from functional_optim.native import cache
from functional_optim.native.private_folder import open_folder

RIGHT, WRONG = b"equal", b"unequal"
"""Content of the cache after a comparison."""


class Verdict:
    """Cached comparison of compiled code, for this machine, its compiler and torch."""

    def __init__(self, text: str, flags: Sequence[str]) -> None:
        self._key = f"{cache.BuildRecipe(text, tuple(flags), cache.default_compiler()).key}-verdict"

    def read(self) -> bytes | None:
        """Return the cached result; None if there is none yet."""
        return open_folder().read(self._key)

    def write(self, right: bool) -> None:
        """Store the result."""
        open_folder().keep(self._key, RIGHT if right else WRONG)
