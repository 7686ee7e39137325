"""The law of front-ends: they give the results of ``update``, also if resumed during a run."""

import copy
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.state import State
from functional_optim.frontends.local_optimizer import local_optimizer
from functional_optim.frontends.torch_optimizer import TorchOptimizer
from functional_optim.optimizer import Optimizer
from functional_optim.plan.leaf_inputs import input_names
from functional_optim.testing.compare import require_same
from functional_optim.testing.runs import Params, Run
from functional_optim.testing.subject import Subject, named_state


def front_ends(subject: Subject, run: Run) -> None:
    """``TorchOptimizer`` and a local optimizer give the bits of ``update``.

    In the middle of the run both are saved, and loaded into new optimizers. That loses no
    parameter, state or shared scalar. A parameter without a gradient does not change.
    """
    optimizer, params = subject.build(run), run.params()
    if input_names(optimizer.links):
        return  # a local optimizer gets gradients only
    state = optimizer.init(params)
    leaves = {name: torch.nn.Parameter(one) for name, one in run.params().items()}
    given = run.params()
    by_torch = TorchOptimizer(leaves.items(), optimizer)
    local = local_optimizer(optimizer, given.items())
    steps = run.grads()
    for number, grads in enumerate(steps):
        if number == len(steps) // 2:
            saved, other = copy.deepcopy(by_torch.state_dict()), copy.deepcopy(local.state_dict())
            by_torch = TorchOptimizer(leaves.items(), optimizer)
            by_torch.load_state_dict(saved)
            local = local_optimizer(optimizer, given.items())
            local.load_state_dict(other)
        params, state = optimizer.update(params, grads, state)
        for name, leaf in leaves.items():
            leaf.grad = grads[name]
        by_torch.step()
        names = [name for group in local.param_groups for name in group["param_names"]]
        local.step_by([grads[name] for name in names])
        stepped = {name: leaf.detach() for name, leaf in leaves.items()}
        require_same("params of TorchOptimizer and update", stepped, params)
        require_same("params of a local optimizer and update", given, params)
    kept = {name: by_torch.state[leaf] for name, leaf in leaves.items()}
    _require_state(optimizer, params, state, kept)
    if by_torch.shared != optimizer.shared(state):
        raise AssertionError(
            f"shared numbers of TorchOptimizer are {by_torch.shared}, those of update "
            f"{optimizer.shared(state)}"
        )


def _require_state(
    optimizer: Optimizer, params: Params, state: State, kept: dict[str, dict[str, Any]]
) -> None:
    """Check that torch's state dicts have the same tensors as the state of ``update``."""
    for name, leaf in state.leaves.items():
        if not int(leaf.step):
            continue  # the first step creates this state again
        want = named_state(optimizer, name, params[name], leaf)
        found = {key: one for key, one in kept[name].items() if isinstance(one, Tensor)}
        step, wanted = found.pop("step"), want.pop("step")
        assert int(step) == int(wanted), f"step counts of {name!r}: {int(step)} and {int(wanted)}"
        require_same(f"the state of {name!r} in TorchOptimizer and update", found, want)
