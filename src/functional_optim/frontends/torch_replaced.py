"""State of a torch.optim front-end whose parameters were replaced in ``param_groups``."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from functional_optim.core.torch_state import has_begun


def complete_replaced(optimizer: Any) -> None:
    """Give state to parameters that were put into ``param_groups`` in place of others.

    Args:
        optimizer: a :class:`~functional_optim.TorchOptimizer`.

    Raises:
        ValueError: as of :func:`drop_replaced`.
    """
    if drop_replaced(optimizer.param_groups, optimizer.state):
        for number in range(len(optimizer.param_groups)):
            optimizer._complete_state(number)  # noqa: SLF001  of a TorchOptimizer


def drop_replaced(
    groups: Sequence[Mapping[str, Any]], states: MutableMapping[Any, dict[str, Any]]
) -> bool:
    """Drop the initial state of parameters that are in no group any more.

    Tensor-parallel libraries replace parameters in ``param_groups`` before the first step. torch's
    classes have no state by then; a TorchOptimizer has the initial one.

    Args:
        groups: of the optimizer.
        states: by parameter, to be changed.

    Returns:
        True if any parameter was replaced; the new ones may have no state yet.

    Raises:
        ValueError: a parameter that was stepped is in no group; nothing is changed.
    """
    there = {id(param) for group in groups for param in group["params"]}
    replaced = [key for key in states if isinstance(key, Tensor) and id(key) not in there]
    for param in replaced:
        if has_begun(states[param]):
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} has state after "
                f"{int(states[param].get('step', 0))} steps and is in no parameter group, so a "
                "checkpoint has no place for it: move the state to the parameter that replaces it "
                "(optimizer.state[new] = optimizer.state.pop(old)), or pop it"
            )
    for param in replaced:
        del states[param]
    return bool(replaced)
