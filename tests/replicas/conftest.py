"""The fixture of ``tests/ddp``: one launch of processes for all tests of a file."""

from .harness import launched

__all__ = ["launched"]
