"""Laws of averaging: property tests for any averager. Needs Hypothesis."""

from functional_optim.testing.search import LawBroken
from hooks.testing.averaging_laws import AVERAGING_LAWS, AveragingLaw
from hooks.testing.check import check_averager, check_averaging_law
from hooks.testing.trainings import AveragerSubject, Training, trainings

__all__ = [
    "AVERAGING_LAWS",
    "AveragerSubject",
    "AveragingLaw",
    "LawBroken",
    "Training",
    "check_averager",
    "check_averaging_law",
    "trainings",
]
