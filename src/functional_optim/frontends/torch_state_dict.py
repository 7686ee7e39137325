"""Hooks of a TorchOptimizer's state dicts: written as torch.optim writes them, completed if loaded.

They use private methods of a :class:`~functional_optim.TorchOptimizer`.
"""

from typing import Any

from functional_optim.core.stage import Link
from functional_optim.frontends.checkpoint_names import matched_by_name
from functional_optim.frontends.torch_entries import require_same_decay, write_checkpoint
from functional_optim.frontends.torch_groups import loaded_groups


def write_as_torch_does(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Change a state dict to torch's form."""
    chains, groups = [], []
    for number, group in enumerate(optimizer.param_groups):
        stages = optimizer._optimizer_of(number).stages  # noqa: SLF001
        chains.append(tuple(map(Link, stages, optimizer._hypers(number, group))))  # noqa: SLF001
        groups.append({**group, "params": optimizer._tensors(number)})  # noqa: SLF001
    write_checkpoint(chains, groups, state_dict, optimizer._made_for)  # noqa: SLF001


def complete_loaded(optimizer: Any) -> None:
    """Complete the state of every parameter of an optimizer that was loaded."""
    optimizer._chains.take_numbers(optimizer.param_groups)  # noqa: SLF001
    for number, group in enumerate(optimizer.param_groups):
        require_same_decay(optimizer._optimizer_of(number).stages, group)  # noqa: SLF001
        optimizer._load_group(number)  # noqa: SLF001


def note_loaded(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Keep what is loaded, as the caller's hooks have left it."""
    groups = matched_by_name(state_dict["param_groups"], optimizer.param_groups)
    loaded = {**state_dict, "param_groups": loaded_groups(groups, optimizer.param_groups)}
    optimizer._loaded = loaded  # noqa: SLF001
    return loaded
