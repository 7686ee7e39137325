"""Hooks of a TorchOptimizer that convert its state dicts from and to torch's form.

They use private methods of a :class:`~functional_optim.TorchOptimizer`.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from functional_optim.core.torch_state import has_begun
from functional_optim.frontends.checkpoint_names import match_by_name
from functional_optim.frontends.torch_entries import check_same_decay, format_checkpoint
from functional_optim.frontends.torch_groups import loaded_groups


def format_state_dict(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Change a state dict to torch's form."""
    chains, groups = [], []
    for number, group in enumerate(optimizer.param_groups):
        stages = optimizer._optimizer_of(number).stages  # noqa: SLF001
        hypers = optimizer._options_of(number).hypers(group)  # noqa: SLF001
        chains.append((stages, hypers))
        groups.append({**group, "params": optimizer._tensors(number)})  # noqa: SLF001
    format_checkpoint(chains, groups, state_dict, optimizer._init_hypers)  # noqa: SLF001


def complete_loaded(optimizer: Any) -> None:
    """Complete the state of every parameter after a load."""
    optimizer._chains.load_shared(optimizer.param_groups)  # noqa: SLF001
    for number, group in enumerate(optimizer.param_groups):
        check_same_decay(optimizer._optimizer_of(number).stages, group)  # noqa: SLF001
        optimizer._load_group(number)  # noqa: SLF001


def store_loaded(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with groups in the optimizer's order, and store it for other hooks."""
    groups = match_by_name(state_dict["param_groups"], optimizer.param_groups)
    loaded = {**state_dict, "param_groups": loaded_groups(groups, optimizer.param_groups)}
    optimizer._loaded = loaded  # noqa: SLF001
    return loaded


def complete_replaced(optimizer: Any) -> None:
    """Create state for parameters that replaced other parameters in ``param_groups``."""
    if drop_replaced(optimizer.param_groups, optimizer.state):
        for number in range(len(optimizer.param_groups)):
            optimizer._complete_state(number)  # noqa: SLF001


def drop_replaced(
    groups: Sequence[Mapping[str, Any]], states: MutableMapping[Any, dict[str, Any]]
) -> bool:
    """Delete the initial state of parameters that are in no group any more.

    Tensor-parallel libraries replace parameters in ``param_groups`` before the first step. torch's
    classes have no state then, but a TorchOptimizer has its initial state.

    Args:
        states: torch's dicts of state, which are changed.

    Returns:
        True if any parameter was replaced. New parameters may have no state yet.

    Raises:
        ValueError: a parameter that was stepped is in no group; nothing has changed.
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
