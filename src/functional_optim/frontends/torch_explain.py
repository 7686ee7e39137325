"""Explanation of how a torch.optim front-end steps its parameter groups."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from functional_optim.frontends.group_tensors import Group
from functional_optim.kernels import in_place
from functional_optim.optimizer import Optimizer
from functional_optim.optimizer.explain import chain_lines, waiting_lines
from functional_optim.plan.step_counts import is_count


def explain_groups(
    groups: Sequence[Group],
    state: Mapping[Tensor, Mapping[str, Any]],
    optimizer_of: Callable[[int], Optimizer],
    optimizer: Optimizer,
) -> str:
    """Return which executor steps which parameters, and why, a line for each kind of them.

    Where there are several groups, each line begins with the number of its group.

    Args:
        groups: as they are now.
        state: torch's dicts.
        optimizer_of: gives the chain of the group of a number.
        optimizer: the whole.
    """
    params = [param for group in groups for param in group.params]
    every = [stage for group in groups for stage in optimizer_of(group.number).stages]
    executor = in_place(optimizer.executor, params, every)
    lines: list[str] = []
    for group in groups:
        head = f"param_groups[{group.number}]: " if len(groups) > 1 else ""
        stages = optimizer_of(group.number).stages
        found = [(param, group.hypers) for param in group.params]
        counts = [state.get(one, {}).get("step") for one in group.params]
        step = 1.0 + max([int(one) for one in counts if is_count(one)] or [0])
        lines += [head + line for line in chain_lines(stages, executor, found, step)]
    return "\n".join([*lines, *waiting_lines(optimizer)])
