"""The law suite: property tests for optimizers, also for your own. It needs hypothesis."""

from functional_optim.testing.case import Case
from functional_optim.testing.cases import ANY_SHAPE, CASES
from functional_optim.testing.chain_cases import CHAINS
from functional_optim.testing.check import LawNotTried, check_law, check_optimizer
from functional_optim.testing.input_cases import INPUT_CASES
from functional_optim.testing.laws import LAWS, Law
from functional_optim.testing.runs import LeafSpec, Run, Values, laid_out, runs
from functional_optim.testing.search import LawBroken
from functional_optim.testing.subject import Subject

__all__ = [
    "ANY_SHAPE",
    "CASES",
    "CHAINS",
    "INPUT_CASES",
    "LAWS",
    "Case",
    "Law",
    "LawBroken",
    "LawNotTried",
    "LeafSpec",
    "Run",
    "Subject",
    "Values",
    "check_law",
    "check_optimizer",
    "laid_out",
    "runs",
]
