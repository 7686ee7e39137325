"""Verdict on compiled code, kept beside it: if it gives torch's bits."""

from collections.abc import Sequence

from functional_optim.native import cache
from functional_optim.native.private_folder import open_folder

RIGHT, WRONG = b"equal", b"unequal"
"""What is kept of a comparison with torch's operations."""


class Verdict:
    """Verdict on a text's library, for this machine, its compiler and torch.

    Args:
        text: in C++.
        flags: that it is compiled with.

    Raises:
        CompileError: there is no compiler.
    """

    def __init__(self, text: str, flags: Sequence[str]) -> None:
        self._key = f"{cache.BuildRecipe(text, tuple(flags), cache.default_compiler()).key}-verdict"

    def read(self) -> bytes | None:
        """Return the verdict; None if there is none yet."""
        return open_folder().read(self._key)

    def write(self, right: bool) -> None:
        """Keep what was found."""
        open_folder().keep(self._key, RIGHT if right else WRONG)
