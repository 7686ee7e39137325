"""One algorithm, one file: formula, State, Hyper, init, rule, constructor."""

from functional_optim.algorithms.adadelta import adadelta
from functional_optim.algorithms.adafactor import adafactor
from functional_optim.algorithms.adagrad import adagrad
from functional_optim.algorithms.adahessian import adahessian, scale_by_adahessian
from functional_optim.algorithms.adam import adam, scale_by_adam
from functional_optim.algorithms.adamax import adamax
from functional_optim.algorithms.adamw import adamw
from functional_optim.algorithms.asgd import asgd
from functional_optim.algorithms.ftrl import ftrl
from functional_optim.algorithms.lamb import lamb
from functional_optim.algorithms.lars import lars
from functional_optim.algorithms.lion import lion, scale_by_lion
from functional_optim.algorithms.muon import muon
from functional_optim.algorithms.nadam import nadam
from functional_optim.algorithms.prodigy import prodigy
from functional_optim.algorithms.qhm import qhm
from functional_optim.algorithms.radam import radam
from functional_optim.algorithms.rmsprop import rmsprop, scale_by_rms
from functional_optim.algorithms.rowwise_adagrad import rowwise_adagrad
from functional_optim.algorithms.rprop import rprop
from functional_optim.algorithms.schedule_free import schedule_free_adamw, schedule_free_sgd
from functional_optim.algorithms.sgd import sgd, trace
from functional_optim.algorithms.soap import soap
from functional_optim.algorithms.sophia import scale_by_sophia, sophia
from functional_optim.algorithms.sparse_adam import sparse_adam
from functional_optim.core.constructor import links_constructors

__all__ = [
    "adadelta",
    "adafactor",
    "adagrad",
    "adahessian",
    "adam",
    "adamax",
    "adamw",
    "asgd",
    "ftrl",
    "lamb",
    "lars",
    "lion",
    "muon",
    "nadam",
    "prodigy",
    "qhm",
    "radam",
    "rmsprop",
    "rowwise_adagrad",
    "rprop",
    "schedule_free_adamw",
    "schedule_free_sgd",
    "sgd",
    "soap",
    "sophia",
    "sparse_adam",
]

links_constructors(
    scale_by_adahessian, scale_by_adam, scale_by_lion, scale_by_rms, scale_by_sophia, trace
)
