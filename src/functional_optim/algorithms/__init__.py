"""Algorithms, one file each: formula, State, Hyper, init, rule, constructor."""

from functional_optim.algorithms.adabelief import adabelief
from functional_optim.algorithms.adabound import adabound
from functional_optim.algorithms.adadelta import adadelta
from functional_optim.algorithms.adafactor import adafactor
from functional_optim.algorithms.adagrad import ADAGRAD, adagrad
from functional_optim.algorithms.adahessian import adahessian, scale_by_adahessian
from functional_optim.algorithms.adam import ADAM, adam, scale_by_adam
from functional_optim.algorithms.adam_mini import adam_mini
from functional_optim.algorithms.adamax import adamax
from functional_optim.algorithms.adamw import adamw
from functional_optim.algorithms.adan import adan
from functional_optim.algorithms.ademamix import ademamix
from functional_optim.algorithms.adopt import adopt
from functional_optim.algorithms.asgd import asgd
from functional_optim.algorithms.came import came
from functional_optim.algorithms.dadapt_adam import dadapt_adam
from functional_optim.algorithms.dadapt_sgd import dadapt_sgd
from functional_optim.algorithms.dion import dion
from functional_optim.algorithms.dog import dog, ldog
from functional_optim.algorithms.ftrl import ftrl
from functional_optim.algorithms.galore import galore_adamw
from functional_optim.algorithms.kl_soap import kl_soap
from functional_optim.algorithms.kron import kron
from functional_optim.algorithms.lamb import lamb
from functional_optim.algorithms.laprop import laprop
from functional_optim.algorithms.lars import lars
from functional_optim.algorithms.lion import lion, scale_by_lion
from functional_optim.algorithms.muon import muon
from functional_optim.algorithms.nadam import nadam
from functional_optim.algorithms.normuon import normuon
from functional_optim.algorithms.novograd import novograd
from functional_optim.algorithms.prodigy import prodigy
from functional_optim.algorithms.qhadam import qhadam
from functional_optim.algorithms.qhm import qhm
from functional_optim.algorithms.radam import radam
from functional_optim.algorithms.rmsprop import rmsprop, scale_by_rms
from functional_optim.algorithms.rowwise_adagrad import rowwise_adagrad
from functional_optim.algorithms.rprop import rprop
from functional_optim.algorithms.schedule_free import schedule_free_adamw, schedule_free_sgd
from functional_optim.algorithms.scion import scion
from functional_optim.algorithms.sgd import SGD, sgd, trace
from functional_optim.algorithms.shampoo import shampoo
from functional_optim.algorithms.signum import sign_sgd, signum
from functional_optim.algorithms.soap import soap
from functional_optim.algorithms.sophia import scale_by_sophia, sophia
from functional_optim.algorithms.sparse_adam import sparse_adam
from functional_optim.algorithms.stable_adamw import stable_adamw
from functional_optim.algorithms.yogi import yogi
from functional_optim.core.constructor import register_link_constructors
from functional_optim.kernels.fused_calls import FUSED_ADAGRAD, FUSED_ADAM, FUSED_SGD
from functional_optim.kernels.fused_kernel import FUSED

__all__ = [
    "adabelief",
    "adabound",
    "adadelta",
    "adafactor",
    "adagrad",
    "adahessian",
    "adam",
    "adam_mini",
    "adamax",
    "adamw",
    "adan",
    "ademamix",
    "adopt",
    "asgd",
    "came",
    "dadapt_adam",
    "dadapt_sgd",
    "dion",
    "dog",
    "ftrl",
    "galore_adamw",
    "kl_soap",
    "kron",
    "lamb",
    "laprop",
    "lars",
    "ldog",
    "lion",
    "muon",
    "nadam",
    "normuon",
    "novograd",
    "prodigy",
    "qhadam",
    "qhm",
    "radam",
    "rmsprop",
    "rowwise_adagrad",
    "rprop",
    "schedule_free_adamw",
    "schedule_free_sgd",
    "scion",
    "sgd",
    "shampoo",
    "sign_sgd",
    "signum",
    "soap",
    "sophia",
    "sparse_adam",
    "stable_adamw",
    "yogi",
]

register_link_constructors(
    scale_by_adahessian, scale_by_adam, scale_by_lion, scale_by_rms, scale_by_sophia, trace
)

FUSED.update({SGD: FUSED_SGD, ADAM: FUSED_ADAM, ADAGRAD: FUSED_ADAGRAD})
