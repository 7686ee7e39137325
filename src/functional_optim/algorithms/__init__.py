"""One algorithm, one file: formula, State, Hyper, init, rule, constructor."""

from functional_optim.algorithms.adadelta import adadelta
from functional_optim.algorithms.adagrad import adagrad
from functional_optim.algorithms.adahessian import adahessian
from functional_optim.algorithms.adam import adam
from functional_optim.algorithms.adamax import adamax
from functional_optim.algorithms.adamw import adamw
from functional_optim.algorithms.ftrl import ftrl
from functional_optim.algorithms.lamb import lamb
from functional_optim.algorithms.lars import lars
from functional_optim.algorithms.lion import lion
from functional_optim.algorithms.muon import muon
from functional_optim.algorithms.prodigy import prodigy
from functional_optim.algorithms.qhm import qhm
from functional_optim.algorithms.rmsprop import rmsprop
from functional_optim.algorithms.rowwise_adagrad import rowwise_adagrad
from functional_optim.algorithms.rprop import rprop
from functional_optim.algorithms.schedule_free import schedule_free_adamw, schedule_free_sgd
from functional_optim.algorithms.sgd import sgd
from functional_optim.algorithms.soap import soap
from functional_optim.algorithms.sophia import sophia

__all__ = [
    "adadelta",
    "adagrad",
    "adahessian",
    "adam",
    "adamax",
    "adamw",
    "ftrl",
    "lamb",
    "lars",
    "lion",
    "muon",
    "prodigy",
    "qhm",
    "rmsprop",
    "rowwise_adagrad",
    "rprop",
    "schedule_free_adamw",
    "schedule_free_sgd",
    "sgd",
    "soap",
    "sophia",
]
