"""C++ loops over many tensors, which are optional.

A step of many small parameters takes about as long as one visit to each of them. Python needs some
tenths of a microsecond per tensor at best; the C++ loops need a tenth of that. A background process
compiles them once, into the cache folder, when an optimizer first has many parameters. Until
then, and without a compiler, Python does the same.
"""

from functional_optim.native.loader import LOOPS, Loops
from functional_optim.native.squares import SHARED, native_norms, native_squares

__all__ = ["LOOPS", "SHARED", "Loops", "native_norms", "native_squares"]
