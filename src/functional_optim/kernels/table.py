"""Table of all executors, by name."""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from functional_optim.core.dtensors import is_dtensor
from functional_optim.core.format import format_value
from functional_optim.core.leaf import Scalars
from functional_optim.core.local_shards import can_step_shards
from functional_optim.core.stage import Stage
from functional_optim.kernels.exact import ExactKernel
from functional_optim.kernels.executor import Executor
from functional_optim.kernels.foreach import ForeachKernel
from functional_optim.kernels.fused_kernel import FusedKernel
from functional_optim.kernels.inductor import InductorKernel
from functional_optim.kernels.kernel_executor import KernelExecutor
from functional_optim.kernels.reference import ReferenceExecutor

ExecutorName = Literal["auto", "reference", "blocked", "fused", "prefer_fused"]


_EXACT, _FUSED, _FOREACH = ExactKernel(sparing=True), FusedKernel(), ForeachKernel()

EXECUTORS: dict[str, Executor] = {
    "auto": KernelExecutor(
        _EXACT,
        InductorKernel(captured_only=True),
        _FOREACH,
        joining=_EXACT,
        listings=[_FOREACH],
        stacks=True,
        on_device=True,
        devices=frozenset({"cpu", "cuda"}),
    ),
    "reference": ReferenceExecutor(),
    "blocked": KernelExecutor(_FOREACH, stacks=True),
    "fused": KernelExecutor(_FUSED, listings=[_FUSED], strict=True),
    "prefer_fused": KernelExecutor(_FUSED, _FOREACH, listings=[_FUSED, _FOREACH], stacks=True),
}
"""All executors by name, also those that users register (:func:`register_executor`).

On the CPU each has the bits of the reference. So no result depends on the kernel, on which rank has
a compiler, or on when a compilation ends. ``fused`` steps on CUDA only. ``prefer_fused`` uses
torch's fused optimizers on CUDA where they support a leaf, and steps as ``auto`` on CUDA and as
``blocked`` on the CPU elsewhere.
"""

_REMOVED = {
    "compile": "the executor 'compile' was removed: executor='auto' compiles a loop where it pays, "
    "and optimizer.bind(params).ready() compiles it at once",
    "stacked": "the executor 'stacked' was removed: executor='auto' steps matrices of one shape in "
    "stacks where that has the bits of single steps",
    "eager": "the executor 'eager' was removed: executor='auto' steps lists of parameters on CUDA, "
    "and executor='blocked' steps without a compiler on the CPU",
    "script": "the executor 'script' was removed: optimizer.script(params) makes a TorchScript "
    "program of a chain, and executor='auto' steps without the GIL too",
}
"""Removed executors, with the text of the error that names the replacement."""


def register_executor(name: str, executor: Executor) -> None:
    """Register your own executor, so that ``optimizer.using(executor=name)`` finds it.

    Args:
        name: a name that no other executor has.
        executor: derived from :class:`Executor`.

    Raises:
        TypeError: the name is not a str, or the executor is not an :class:`Executor`.
        ValueError: another executor has this name.

    Example::

        >>> import torch
        >>> from functional_optim import sgd
        >>> from functional_optim.kernels import EXECUTORS, ReferenceExecutor, register_executor
        >>> class Counting(ReferenceExecutor):
        ...     steps = 0
        ...     def update(self, stages, leaves, measured):
        ...         self.steps += 1
        ...         return super().update(stages, leaves, measured)
        >>> counting = Counting()
        >>> register_executor("counting", counting)
        >>> optimizer, params = sgd(lr=0.5).using(executor="counting"), torch.ones(1)
        >>> optimizer.update(params, torch.ones(1), optimizer.init(params))[0], counting.steps
        (tensor([0.5000]), 1)
        >>> del EXECUTORS["counting"]
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of an executor must be a str, got {format_value(name)}")
    if not isinstance(executor, Executor):
        raise TypeError(
            "an executor must be derived from functional_optim.kernels.Executor, "
            f"got {format_value(executor)}"
        )
    if name in EXECUTORS:
        raise ValueError(
            f"there is an executor {name!r} already; give another name than {', '.join(EXECUTORS)}"
        )
    EXECUTORS[name] = executor


def check_executor(name: object) -> None:
    """Check the name of an executor.

    Raises:
        ValueError: no executor has this name. The text names the replacement of a removed executor.
    """
    if name not in EXECUTORS:
        said = f"executor must be one of {', '.join(EXECUTORS)}, got {name!r}"
        removed = _REMOVED.get(name) if isinstance(name, str) else None
        raise ValueError(said if removed is None else f"{said}; {removed}")


def executor_for(name: str, params: Iterable[Tensor | None], stages: Sequence[Stage]) -> Executor:
    """Return the executor that steps these parameters; the reference while torch.compile traces."""
    if torch.compiler.is_compiling():
        return EXECUTORS["reference"]
    return EXECUTORS[in_place(name, [one for one in params if one is not None], stages)]


def executor_taking(name: str, scalars: Scalars) -> Executor:
    """Return the executor of a name, for coefficients on the host or on the device.

    Raises:
        ValueError: the executor takes no coefficients on the device.
    """
    found = EXECUTORS[name].taking(scalars)
    if found is None:
        able = [repr(one) for one, other in EXECUTORS.items() if other.taking(scalars)]
        raise ValueError(
            f"a step that may be captured is made by {' or '.join(sorted(able))}, got "
            f"executor={name!r}, which takes coefficients as Python's numbers; give "
            "optimizer.using(executor='auto')"
        )
    return found


def in_place(name: str, params: Iterable[Tensor], stages: Sequence[Stage]) -> str:
    """Return the name of the executor that steps these parameters, in ``update`` and ``update_``.

    ``auto``, the default of an optimizer, is ``reference`` on devices without a kernel, and for
    DTensors if a stage needs whole tensors: only the reference computes with DTensors. All other
    names are returned unchanged.

    Args:
        name: of the optimizer's executor.
        params: to be stepped.
        stages: of the chain.
    """
    devices = EXECUTORS[name].devices
    if not devices:
        return name
    on_shards = can_step_shards(stages)
    kinds = {
        "DTensor" if not on_shards and is_dtensor(param) else param.device.type for param in params
    }
    return name if kinds <= devices else "reference"
