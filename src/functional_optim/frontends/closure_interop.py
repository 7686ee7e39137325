"""Conversion of the state of a ClosureOptimizer from and to torch.optim.LBFGS."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.algorithms.lbfgs import LBFGSState
from functional_optim.core.closure_optimizer import ClosureOptimizer
from functional_optim.core.flat_vector import flatten_params, real_numel
from functional_optim.frontends.torch_checkpoint import own_copy

_LISTS = ("old_dirs", "old_stps", "ro")
_COUNTS = ("func_evals", "n_iter")


def torch_entries(state: LBFGSState) -> dict[str, Any]:
    """Return a state in the form of torch.optim.LBFGS: the entries of the first parameter.

    torch's entry ``al`` is left out: each iteration writes this list before reading it.
    """
    counts = {name: getattr(state, name) for name in _COUNTS}
    if state.n_iter == 0:
        return counts
    entries = {**counts, **state._asdict()}
    del entries["checksum"]
    return {name: list(one) if name in _LISTS else one for name, one in entries.items()}


def state_of_entries(
    optimizer: ClosureOptimizer,
    entries: Mapping[str, Any],
    params: Sequence[Tensor],
    checksum: int = 0,
) -> LBFGSState:
    """Return the state that is stored in the entries of the first parameter."""
    func_evals, n_iter = (int(entries.get(name, 0)) for name in _COUNTS)
    fresh = LBFGSState(n_iter=n_iter, func_evals=func_evals, checksum=checksum)
    if not fresh.n_iter:
        return fresh
    names = [name for name in LBFGSState._fields if name not in (*_COUNTS, "checksum")]
    missing = [name for name in names if entries.get(name) is None]
    if missing:
        raise ValueError(
            f"the state of {optimizer.rule.name} has no {', '.join(missing)}, though it has made "
            f"{fresh.n_iter} iterations: it is of another optimizer"
        )
    values: dict[str, Any] = {name: entries[name] for name in names}
    values.update({name: tuple(values[name]) for name in _LISTS})
    state = fresh._replace(**values)
    numel = sum(map(real_numel, params))
    for vector in (state.d, state.prev_flat_grad, *state.old_dirs, *state.old_stps):
        if vector is None or vector.shape != (numel,):
            raise ValueError(
                f"the state of {optimizer.rule.name} has vectors of "
                f"{0 if vector is None else vector.numel()} elements, and the parameters have "
                f"{numel}: the state belongs to other parameters; load the state of these"
            )
    return state


def closure_from_torch(
    optimizer: ClosureOptimizer,
    params: tuple[dict[str, Tensor], ...],
    instance: torch.optim.Optimizer,
) -> LBFGSState:
    """Return a copy of the state of a live torch.optim.LBFGS."""
    tree = flatten_params(params, optimizer.namespace)
    entries = own_copy(dict(instance.state.get(tree.params[0], {})))
    return state_of_entries(optimizer, entries, tree.params, tree.checksum)


def closure_state_dict(
    optimizer: ClosureOptimizer,
    params: Any,
    state: LBFGSState,
    cls: type | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a state dict that torch.optim.LBFGS loads."""
    unknown = [name for name in options if name not in optimizer.hyper]
    if unknown:
        raise ValueError(f"torch.optim.LBFGS has no option {unknown[0]!r}")
    if cls is not None and not issubclass(cls, torch.optim.LBFGS):
        raise ValueError(
            f"{cls.__name__} does not load the state of {optimizer.rule.name}; leave out cls, or "
            "give torch.optim.LBFGS"
        )
    is_groups = isinstance(params, (tuple, list)) and all(isinstance(one, dict) for one in params)
    if is_groups and len(params) > 1:
        raise ValueError(
            f"torch.optim.LBFGS takes one parameter group, got {len(params)}; give one dict"
        )
    tree = flatten_params(params, optimizer.namespace)
    optimizer.require_state(state, tree.checksum, tree.numel)
    group = {**optimizer.hyper, **options, "params": list(range(len(tree.params)))}
    begun = state.func_evals > 0
    return {"state": {0: torch_entries(state)} if begun else {}, "param_groups": [group]}
