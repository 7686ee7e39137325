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


class ForwardWaits:
    """Hooks on a module and its submodules: wait before forward, state_dict and load_state_dict.

    Args:
        root: the module that DDP wraps.
        paths: of the gathered parameters, by their ``id``.
        wait_for: waits until these parameters are complete.
    """

    def __init__(self, root: nn.Module, paths: Mapping[int, str], wait_for: WaitFor) -> None:
        self._wait_for = wait_for
        self._own: dict[int, list[Tensor]] = {}
        self._below: dict[int, list[int]] = {}
        self._called: set[int] = set()
        """Modules called since the last call of the root."""
        self._always: set[int] | None = None
        """Modules called in every forward pass of the root so far; None during the first."""
        for module in root.modules():
            own: list[Tensor] = [p for p in module.parameters(recurse=False) if id(p) in paths]
            if own:
                self._own[id(module)] = own
        self.handles: list[RemovableHandle] = []
        for module in root.modules():
            inner = (id(one) for one in module.modules() if one is not module)
            self._below[id(module)] = [key for key in inner if key in self._own]
            self._add_hooks(module, module is root)

    def _add_hooks(self, module: nn.Module, is_root: bool) -> None:
        key = id(module)

        def before_forward(_: nn.Module, arguments: Any) -> None:
            if is_root:
                self._called = set()
            self._called.add(key)
            self._wait_for(self._read_by(key))

        def before_state(*_: Any) -> None:
            self._wait_for(self._own.get(key, ()))

        self.handles += [
            module.register_forward_pre_hook(before_forward, prepend=True),
            module.register_state_dict_pre_hook(before_state),
            module.register_load_state_dict_pre_hook(before_state),
        ]
        if is_root:
            self.handles.append(module.register_forward_hook(self._end_forward))

    def _read_by(self, key: int) -> list[Tensor]:
        """Return the parameters that a module may read before it calls a submodule."""
        found = list(self._own.get(key, ()))
        for inner in self._below[key]:
            if self._always is None or inner not in self._always:
                found += self._own[inner]
        return found

    def _end_forward(self, *_: Any) -> None:
        # A copy: recomputation in backward calls modules after this.
        called = set(self._called)
        self._always = called if self._always is None else self._always & called
