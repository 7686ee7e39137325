"""Loops over many tensors in C++, where a compiler is at hand: a step can do without.

A step of many small parameters takes about as long as looking at each of them once. Python's
fastest way of looking takes some tenths of a microsecond per tensor; these loops take a tenth of
that. They are compiled once, by a process in the background, into the folder of compiled steps:
once somebody steps, or binds, many parameters. Until they are there, and where
they never are, Python does the same.
"""

from functional_optim.native.loader import LOOPS, Loops
from functional_optim.native.squares import native_norms, native_squares

__all__ = ["LOOPS", "Loops", "native_norms", "native_squares"]
