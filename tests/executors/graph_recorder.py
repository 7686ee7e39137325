"""CPU substitute for a CUDA graph: it records the kernels of some calls and runs them again.

A replay uses the memory and the Python numbers of the recording, as on a device. No Python code of
the package runs. During the recording, nothing can wait for the device or copy a number to it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from functional_optim.core import graph_capture
from functional_optim.kernels.inductor import InductorKernel

WAITING = {"_local_scalar_dense", "allclose", "equal", "is_nonzero", "nonzero"}
"""Operations that make Python wait for their result."""
BRINGING = {"lift_fresh", "lift_fresh_copy", "_pin_memory"}
"""Operations that copy numbers from Python's memory to a device."""


def _memory(value: Any) -> int:
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else 0


class _Recorder(TorchDispatchMode):
    def __init__(self, kernels: list[Callable[[], None]]) -> None:
        super().__init__()
        self._kernels = kernels
        self.seen: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name.partition("::")[2]
        if name in WAITING or name in BRINGING:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        made = function(*args, **kwargs)
        for one in optree.tree_leaves((args, kwargs, made)):
            if isinstance(one, Tensor):
                self.seen[id(one)] = one
        given = {_memory(one) for one in optree.tree_leaves((args, kwargs))} - {0}
        new = [one for one in optree.tree_leaves(made) if _memory(one) not in given]

        def kernel() -> None:
            again = function(*args, **kwargs)
            left = [one for one in optree.tree_leaves(again) if _memory(one) not in given]
            for old, one in zip(new, left, strict=True):
                if isinstance(old, Tensor):
                    old.copy_(one)

        self._kernels.append(kernel)
        return made


class Graph:
    """Recorded kernels that can run again."""

    def __init__(self) -> None:
        self._kernels: list[Callable[[], None]] = []
        self._seen: tuple[Tensor, ...] = ()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the operations within a block. Unlike a device, also run them."""
        find = InductorKernel._find

        def found(kernel: InductorKernel, *chunk: Any) -> Any:
            made = find(kernel, *chunk)
            return made if isinstance(made, str) else (self._recorded(made[0]), *made[1:])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(InductorKernel, "_find", found)
            patch.setattr(graph_capture, "_IS_CUDA", lambda _: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with _Recorder(self._kernels) as recorder:
                yield
            self._seen = tuple(recorder.seen.values())

    def _recorded(self, step: Callable[..., object]) -> Callable[..., None]:
        """Wrap a compiled program, which counts as one kernel."""

        def kernel(*tensors: Tensor) -> None:
            with _disable_current_modes():
                step(*tensors)

        def recorded(*tensors: Tensor) -> None:
            self._kernels.append(lambda: kernel(*tensors))
            kernel(*tensors)

        return recorded

    def replay(self) -> None:
        """Run the kernels again. Autograd does not notice, as with a device."""
        with torch.no_grad(), _unsafe_preserve_version_counter(self._seen):
            for kernel in self._kernels:
                kernel()
