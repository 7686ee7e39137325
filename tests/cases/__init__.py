"""Tables of cases: all algorithms and chains that the tests run, also for docs and benchmarks."""

from .algorithms import ANY_SHAPE, CASES
from .case import Case
from .chains import CHAINS, ONE_CHAIN
from .inputs import INPUT_CASES

__all__ = ["ANY_SHAPE", "CASES", "CHAINS", "INPUT_CASES", "ONE_CHAIN", "Case"]
