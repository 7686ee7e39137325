"""Callers of a function, for interfaces of torch that do not say what they want."""

import sys
from types import FrameType


def is_called_by(package: str) -> bool:
    """Return True if a caller, direct or indirect, is a module of a package."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  documented
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(package):
            return True
        frame = frame.f_back
    return False
