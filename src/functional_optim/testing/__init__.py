"""The law suite: property tests for optimizers, also for your own. It needs hypothesis."""

from functional_optim.testing.check import LawNotTried, check_law, check_optimizer
from functional_optim.testing.laws import LAWS, Law
from functional_optim.testing.runs import LeafSpec, Run, Values, laid_out, runs
from functional_optim.testing.search import LawBroken
from functional_optim.testing.subject import Subject

__all__ = [
    "LAWS",
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
