"""Optimizers as one pure function on one tensor, and the ways of running it."""

from functional_optim.algebra import freeze, masked, partition
from functional_optim.algorithms import (
    adadelta,
    adagrad,
    adam,
    adamax,
    adamw,
    ftrl,
    lion,
    prodigy,
    qhm,
    rmsprop,
    rowwise_adagrad,
    rprop,
    schedule_free_adamw,
    schedule_free_sgd,
    sgd,
)
from functional_optim.bound import BoundOptimizer
from functional_optim.bounds import Interval
from functional_optim.capturable import CapturableOptimizer
from functional_optim.export import export_step
from functional_optim.flat_layout import FlatLayout
from functional_optim.optimizer import Optimizer, chain
from functional_optim.registry import (
    as_functional_optim,
    functional_optim_map,
    register_functional_optim,
)
from functional_optim.remote import DistributedOptimizer
from functional_optim.scripted import ScriptedOptimizer
from functional_optim.stage import Gate, Link, NoState, Rule, Transform
from functional_optim.state import GateCounts, LeafState, Shared, State
from functional_optim.storage import compare_storages, describe, mapped_state, stored
from functional_optim.torch_interop import from_torch, to_torch_state_dict
from functional_optim.torch_optimizer import TorchOptimizer
from functional_optim.transforms import (
    clip_by_global_norm,
    clip_by_value,
    decoupled_weight_decay,
    maximized,
    weight_decay,
)
from functional_optim.tree import leaf_paths
from functional_optim.where import if_any, labels, matching, with_shape
from functional_optim.wrappers import accumulate, apply_if_finite, ema, lookahead, sam

__all__ = [
    "BoundOptimizer",
    "CapturableOptimizer",
    "DistributedOptimizer",
    "FlatLayout",
    "Gate",
    "GateCounts",
    "Interval",
    "LeafState",
    "Link",
    "NoState",
    "Optimizer",
    "Rule",
    "ScriptedOptimizer",
    "Shared",
    "State",
    "TorchOptimizer",
    "Transform",
    "accumulate",
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "apply_if_finite",
    "as_functional_optim",
    "chain",
    "clip_by_global_norm",
    "clip_by_value",
    "compare_storages",
    "decoupled_weight_decay",
    "describe",
    "ema",
    "export_step",
    "freeze",
    "from_torch",
    "ftrl",
    "functional_optim_map",
    "if_any",
    "labels",
    "leaf_paths",
    "lion",
    "lookahead",
    "mapped_state",
    "masked",
    "matching",
    "maximized",
    "partition",
    "prodigy",
    "qhm",
    "register_functional_optim",
    "rmsprop",
    "rowwise_adagrad",
    "rprop",
    "sam",
    "schedule_free_adamw",
    "schedule_free_sgd",
    "sgd",
    "stored",
    "to_torch_state_dict",
    "weight_decay",
    "with_shape",
]
