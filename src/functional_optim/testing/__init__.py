"""The law suite: property tests for optimizers, also for your own. It needs hypothesis."""

from typing import NoReturn

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

_CASES = {"ANY_SHAPE", "CASES", "CHAINS", "Case", "INPUT_CASES"}


def __getattr__(name: str) -> NoReturn:
    if name in _CASES:  # ``from functional_optim.testing import`` drops an AttributeError's text
        raise ImportError(
            f"functional_optim.testing has no {name} any more: the tables of this project's own "
            "algorithms are in tests/cases of the repository; call check_optimizer(optimizer) to "
            "test an optimizer of yours"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
