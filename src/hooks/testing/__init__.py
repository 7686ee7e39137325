"""The laws of averaging: property tests for our averagers and for anyone's. Needs hypothesis."""

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
