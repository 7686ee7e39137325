"""Composable optimizers for PyTorch: write an update rule once, and run it in many ways.

In a training script, change the line that makes the optimizer. The rest stays as it is::

    import functional_optim as fo

    optimizer = fo.TorchOptimizer(model.parameters(), fo.adamw(lr=1e-3))

An optimizer is a chain of stages. Each stage is a pure function on one tensor. The chain holds no
parameters and no state, and ``update`` changes nothing that it is given::

    optimizer = fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(lr=1e-3), fo.ema(0.999))
    state = optimizer.init(params)
    params, state = optimizer.update(params, grads, state)

Example::

    >>> import torch
    >>> import functional_optim as fo
    >>> optimizer = fo.chain(fo.clip_by_global_norm(1.0), fo.sgd(lr=0.5))
    >>> params = {"w": torch.tensor([1.0, 1.0])}
    >>> grads = {"w": torch.tensor([3.0, 4.0])}
    >>> params, state = optimizer.update(params, grads, optimizer.init(params))
    >>> params["w"]
    tensor([0.7000, 0.6000])

Where to go from here. Call ``help`` on any of these names:

- Algorithms: ``adamw``, ``sgd``, ``muon``, ``lion``, ``soap`` and others; ``scale_by_adam`` and
  other transforms are parts to build with.
- Composition: ``chain``; ``partition``, ``masked`` and ``freeze`` choose parameters, with
  ``matching``, ``with_shape`` and ``labels``.
- Wrappers: ``accumulate``, ``apply_if_finite``, ``ema``, ``swa``, ``lookahead``, ``sam`` and
  others.
- Schedules in place of any number: ``warmup``, ``cosine``, ``warmup_stable_decay``, ``joined``.
- A rule of your own: ``Rule``, ``Transform`` and the functions of ``functional_optim.numeric``.
- With torch: ``TorchOptimizer``, ``from_torch``, ``to_torch_state_dict``; and
  ``register_functional_optim`` for an optimizer class that you already have.
- Less memory: ``stored`` keeps state in 8 or 16 bits or elsewhere; ``describe`` counts the bytes.
- Other ways to run: ``Optimizer.bind`` (flat buffers), ``export_step`` (a program),
  ``DistributedOptimizer`` (remote parameters).
- Property tests of an optimizer: ``functional_optim.testing.check_optimizer``.

Two more packages are installed with this one. ``hooks`` steps parameters inside DDP's backward
pass and averages parameters over ranks. ``sharding`` plans which rank owns which parameter, and has
``ZeroRedundancyOptimizer``.

On the command line, ``functional-optim --help`` lists the commands. ``__version__`` is the version
of the installed package.
"""

import sys

from functional_optim import algorithms, schedules, transforms, wrappers
from functional_optim.algorithms import *
from functional_optim.algorithms.adahessian import scale_by_adahessian
from functional_optim.algorithms.adam import scale_by_adam
from functional_optim.algorithms.lbfgs import lbfgs
from functional_optim.algorithms.lion import scale_by_lion
from functional_optim.algorithms.polar import PolarFactor
from functional_optim.algorithms.rmsprop import scale_by_rms
from functional_optim.algorithms.sgd import trace
from functional_optim.algorithms.sophia import scale_by_sophia
from functional_optim.bounds import Interval
from functional_optim.composition import chain, freeze, masked, partition
from functional_optim.core import selectors as _selectors
from functional_optim.core import stage as _stage
from functional_optim.core import state as _state
from functional_optim.core.closure_optimizer import ClosureOptimizer
from functional_optim.core.gate import Gate
from functional_optim.core.leaf_input import LeafInput
from functional_optim.core.selectors import if_any, labels, matching, with_shape
from functional_optim.core.stage import Link, NoState, Rule, Transform
from functional_optim.core.state import GateCounts, LeafState, Shared, State
from functional_optim.core.tree import leaf_paths
from functional_optim.curvature import hutchinson
from functional_optim.export import export_step
from functional_optim.frontends import torch_closure as _torch_closure  # noqa: F401  registered
from functional_optim.frontends.registry import (
    as_functional_optim,
    functional_optim_map,
    register_functional_optim,
)
from functional_optim.frontends.torch_interop import from_torch, to_torch_state_dict
from functional_optim.frontends.torch_optimizer import TorchOptimizer
from functional_optim.optimizer import Optimizer
from functional_optim.optimizer.bound import BoundOptimizer
from functional_optim.optimizer.capturable import CapturableOptimizer
from functional_optim.optimizer.scripted_optimizer import ScriptedOptimizer
from functional_optim.optimizer.state_fields import state_field, with_state_field
from functional_optim.plan.flat.layout import FlatLayout
from functional_optim.remote import DistributedOptimizer
from functional_optim.schedules import *
from functional_optim.storage import compare_storages, describe, mapped_state, stored
from functional_optim.transforms import *
from functional_optim.version import installed_version as _installed_version
from functional_optim.wrappers import *

__version__ = _installed_version()

# Pickles of earlier versions contain the old names of these modules.
sys.modules.update(
    {
        f"{__name__}.stage": _stage,
        f"{__name__}.state": _state,
        f"{__name__}.where": _selectors,
        f"{__name__}.core.where": _selectors,
    }
)

__all__ = [
    "BoundOptimizer",
    "CapturableOptimizer",
    "ClosureOptimizer",
    "DistributedOptimizer",
    "FlatLayout",
    "Gate",
    "GateCounts",
    "Interval",
    "LeafInput",
    "LeafState",
    "Link",
    "NoState",
    "Optimizer",
    "PolarFactor",
    "Rule",
    "ScriptedOptimizer",
    "Shared",
    "State",
    "TorchOptimizer",
    "Transform",
    "as_functional_optim",
    "chain",
    "compare_storages",
    "describe",
    "export_step",
    "freeze",
    "from_torch",
    "functional_optim_map",
    "hutchinson",
    "if_any",
    "labels",
    "lbfgs",
    "leaf_paths",
    "mapped_state",
    "masked",
    "matching",
    "partition",
    "register_functional_optim",
    "scale_by_adahessian",
    "scale_by_adam",
    "scale_by_lion",
    "scale_by_rms",
    "scale_by_sophia",
    "state_field",
    "stored",
    "to_torch_state_dict",
    "trace",
    "with_shape",
    "with_state_field",
]
__all__ += algorithms.__all__
__all__ += schedules.__all__
__all__ += transforms.__all__
__all__ += wrappers.__all__
