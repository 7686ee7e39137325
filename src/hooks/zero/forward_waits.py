"""Waits for gathers that continue into the next forward pass, module by module.

A module's own parameters are waited for before its forward. Some modules read parameters of
submodules that are never called (``nn.MultiheadAttention`` reads those of its ``out_proj``). So
before a module's forward, the hook also waits for submodules that were not called in every forward
pass so far.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

WaitFor = Callable[[Iterable[Tensor]], None]


def add_forward_waits(
    root: nn.Module, paths: Mapping[int, str], wait_for: WaitFor
) -> list[RemovableHandle]:
    """Wait before forward, state_dict and load_state_dict of a module and its submodules.

    Args:
        root: the module that DDP wraps.
        paths: of the gathered parameters, by their ``id``.
        wait_for: waits until these parameters are complete.

    Returns:
        The handles of all hooks on modules.
    """
    # By the id of a module: modules need not be hashable, and copies of modules run the hooks too.
    own = {
        id(module): [one for one in module.parameters(recurse=False) if id(one) in paths]
        for module in root.modules()
    }
    below = {
        id(module): [key for key in map(id, module.modules()) if key != id(module) and own[key]]
        for module in root.modules()
    }
    called: set[int] = set()
    """Modules called since the last call of the root."""
    always: set[int] | None = None
    """Modules called in every forward pass of the root so far; None during the first."""

    def before_forward(module: nn.Module, arguments: Any) -> None:
        if id(module) == root_id:
            called.clear()
        called.add(id(module))
        read: list[Tensor] = [*own.get(id(module), ())]  # before a submodule is called
        for inner in below.get(id(module), ()):
            if always is None or inner not in always:
                read += own[inner]
        wait_for(read)

    def before_state(module: nn.Module, *_: Any) -> None:
        wait_for(own.get(id(module), ()))

    def end_forward(*_: Any) -> None:
        nonlocal always
        # A copy: recomputation in backward calls modules after this.
        always = {*called} if always is None else always & called

    root_id, handles = id(root), [root.register_forward_hook(end_forward)]
    for module in root.modules():
        handles += [
            module.register_forward_pre_hook(before_forward, prepend=True),
            module.register_state_dict_pre_hook(before_state),
            module.register_load_state_dict_pre_hook(before_state),
        ]
    return handles
