"""State dicts in the form of torch.optim's classes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.stage import Stage
from functional_optim.core.torch_state import has_begun, starts_in_first_step
from functional_optim.storage.plain import plain_stages

DECOUPLED = "decoupled_weight_decay"
"""The name of the stage, and of torch's option, by which weight decays beside the gradient."""


COUNTED_IN_PYTHON = frozenset({"sparse_adam"})
"""Rules whose class of torch keeps its step count as an int, and would compute in float32 with a
tensor in its place."""


def torch_step(step: Tensor) -> Tensor:
    """A step count as torch.optim keeps it: 0-d, on the CPU, in the dtype torch gives scalars."""
    wide = torch.get_default_dtype() == torch.float64 or int(step) > 2**24
    return step.to(device="cpu", dtype=torch.float64 if wide else torch.float32)


def checkpoint_entries(
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    param: Tensor,
    entries: Mapping[str, Any],
    *,
    damped: bool,
) -> dict[str, Any]:
    """The entries of a parameter as a checkpoint has them: the step count in torch's dtype.

    Of a parameter at step 0 there are none where torch would make them in the step itself, and take
    what it finds for those of a later step.

    Args:
        stages: of the chain.
        hypers: its hyper-parameters.
        param: the parameter.
        entries: its state.
        damped: whether a class of torch damps what it adds to a buffer, but not the first time.
    """
    # A buffer of zeros does no harm there, unless its first gradient is damped for it.
    if damped and not has_begun(entries) and starts_in_first_step(stages, hypers, param):
        entries = {"step": entries["step"]}
    step = entries["step"]
    in_python = stages[-1].name in COUNTED_IN_PYTHON
    return {**entries, "step": int(step) if in_python else torch_step(step)}


def with_group_steps(
    states: Mapping[Any, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Parameter groups of a state dict; the step count of those that keep one is that of now.

    Args:
        states: by the number of a parameter, its entries.
        groups: with the numbers of their parameters. One with a "step" is of a class that counts
            for the group: the largest count of its parameters is written.
    """
    made = []
    for group in groups:
        steps = [states.get(number, {}).get("step", 0) for number in group["params"]]
        counted = {"step": max(map(int, steps), default=0)} if "step" in group else {}
        made.append({**group, **counted})
    return made


def decouples(stages: Sequence[Stage]) -> bool:
    """Return True if weight decays beside the gradient and not in it; of a stored chain too."""
    return any(stage.name == DECOUPLED for stage in plain_stages(stages))


def decay_options(stages: Sequence[Stage]) -> dict[str, Any]:
    """Return the option that says in a checkpoint's group if weight decay is decoupled."""
    return {DECOUPLED: True} if decouples(stages) else {}


def own_copy(value: Any) -> Any:
    """Copy dicts and lists, and their tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: own_copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [own_copy(item) for item in value]
    return value
