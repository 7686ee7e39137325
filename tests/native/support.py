"""Access to the loops, which must be loaded."""

from functional_optim.native import LOOPS, Loops

MANY = 2500
"""Number of tensors in tests with very many."""


def loops() -> Loops:
    found = LOOPS.get(0)
    assert found is not None
    return found
