"""Waiting for parameters module by module, where gathers run on into the next forward pass.

A module's own parameters are waited for before its forward. Some modules read parameters of others
that are never called themselves (``nn.MultiheadAttention`` does so with its ``out_proj``): so with
a module, those below it are waited for that have not been called in each forward pass so far.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

WaitFor = Callable[[Iterable[Tensor]], None]


class ForwardWaits:
    """Hooks on all modules below a root, before forward and before state is read or written.

    Args:
        root: the module that DDP wraps.
        paths: of the parameters that are gathered, by their identity.
        wait_for: returns when the parameters given are whole.
    """

    def __init__(self, root: nn.Module, paths: Mapping[int, str], wait_for: WaitFor) -> None:
        self._wait_for = wait_for
        self._own: dict[int, list[Tensor]] = {}
        self._below: dict[int, list[int]] = {}
        self._called: set[int] = set()
        """Modules called since the root was."""
        self._always: set[int] | None = None
        """Modules called in each forward pass of the root so far; None before the first is over."""
        for module in root.modules():
            own: list[Tensor] = [p for p in module.parameters(recurse=False) if id(p) in paths]
            if own:
                self._own[id(module)] = own
        self.handles: list[RemovableHandle] = []
        for module in root.modules():
            inner = (id(one) for one in module.modules() if one is not module)
            self._below[id(module)] = [key for key in inner if key in self._own]
            self._watch(module, module is root)

    def _watch(self, module: nn.Module, is_root: bool) -> None:
        key = id(module)

        def before_forward(_: nn.Module, arguments: Any) -> None:
            if is_root:
                self._enter_root()
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
            self.handles.append(module.register_forward_hook(self._leave_root))

    def _read_by(self, key: int) -> list[Tensor]:
        """Return the parameters that a module may read before any module below it is called."""
        found = list(self._own.get(key, ()))
        for inner in self._below[key]:
            if self._always is None or inner not in self._always:
                found += self._own[inner]
        return found

    def _enter_root(self) -> None:
        self._called = set()

    def _leave_root(self, *_: Any) -> None:
        # A copy: what is computed again in backward is called outside of forward.
        called = set(self._called)
        self._always = called if self._always is None else self._always & called
