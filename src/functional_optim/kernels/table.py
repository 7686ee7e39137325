"""The one table of executors: whoever runs a chain finds its executor here, by name."""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from functional_optim.core.brief import brief
from functional_optim.core.dtensors import is_sharded
from functional_optim.core.leaf import Scalars
from functional_optim.core.local_shards import can_step_shards
from functional_optim.core.stage import Stage
from functional_optim.kernels.blocked import BlockedKernel
from functional_optim.kernels.chunk_executor import ChunkExecutor
from functional_optim.kernels.exact import ExactKernel
from functional_optim.kernels.executor import Executor
from functional_optim.kernels.foreach import ForeachKernel
from functional_optim.kernels.fused import FusedKernel
from functional_optim.kernels.inductor import InductorKernel
from functional_optim.kernels.reference import ReferenceExecutor
from functional_optim.kernels.stacked import StackedExecutor

ExecutorName = Literal["auto", "reference", "blocked", "fused", "prefer_fused", "eager"]


_EXACT, _FUSED, _BLOCKED = ExactKernel(sparing=True), FusedKernel(), BlockedKernel()
_LISTS, _STACKS = ForeachKernel(on_cpu=False), StackedExecutor()

EXECUTORS: dict[str, Executor] = {
    "auto": ChunkExecutor(
        _EXACT,
        InductorKernel(captured_only=True),
        _BLOCKED,
        joining=_EXACT,
        listings=[_LISTS],
        stacks=_STACKS,
        on_device=True,
        stand_ins={"cpu": "auto", "cuda": "eager"},
    ),
    "reference": ReferenceExecutor(ChunkExecutor(on_device=True)),
    "blocked": ChunkExecutor(_BLOCKED, stacks=_STACKS),
    "fused": ChunkExecutor(_FUSED, listings=[_FUSED], strict=True),
    "prefer_fused": ChunkExecutor(_FUSED, _BLOCKED, listings=[_FUSED, _LISTS], stacks=_STACKS),
    "eager": ChunkExecutor(_BLOCKED, listings=[_LISTS], stacks=_STACKS),
}
"""All executors by name, those of users (:func:`register_executor`) among them.

On the CPU each has the bits of the reference, so no result shows which kernel made a step, which
rank has a compiler, or when a compiler was done. ``fused`` steps on CUDA alone; ``prefer_fused``
takes torch's fused kernels there for what they step, and is ``eager`` for all else.
"""

_REMOVED = {
    "compile": "the executor 'compile' was removed: executor='auto' compiles a loop where it pays, "
    "and optimizer.bind(params).ready() compiles it at once",
    "stacked": "the executor 'stacked' was removed: executor='auto' steps matrices of one shape in "
    "stacks where that has the bits of single steps",
    "script": "the executor 'script' was removed: optimizer.script(params) makes a TorchScript "
    "program of a chain, and executor='auto' steps without the GIL too",
}
"""Names that were executors once, with the replacement of each."""


def register_executor(name: str, executor: Executor) -> None:
    """Give an executor of your own a name, by which ``optimizer.using(executor=name)`` finds it.

    Args:
        name: that no other executor has.
        executor: derived from :class:`Executor`.

    Raises:
        TypeError: a name that is no text, or what is no executor.
        ValueError: a name that another executor has.

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
        raise TypeError(f"the name of an executor must be a str, got {brief(name)}")
    if not isinstance(executor, Executor):
        raise TypeError(
            f"an executor is derived from functional_optim.kernels.Executor, got {brief(executor)}"
        )
    if name in EXECUTORS:
        raise ValueError(
            f"there is an executor {name!r} already; give another name than {', '.join(EXECUTORS)}"
        )
    EXECUTORS[name] = executor


def check_executor(name: object) -> None:
    """A name in the table.

    Raises:
        ValueError: none of this name is there; names the replacement of one that was removed.
    """
    if name not in EXECUTORS:
        said = f"executor must be one of {', '.join(EXECUTORS)}, got {name!r}"
        removed = _REMOVED.get(name) if isinstance(name, str) else None
        raise ValueError(said if removed is None else f"{said}; {removed}")


def executor_for(name: str, params: Iterable[Tensor | None], stages: Sequence[Stage]) -> Executor:
    """Return what steps these parameters: the reference where torch.compile traces."""
    if torch.compiler.is_compiling():
        return EXECUTORS["reference"]
    return EXECUTORS[in_place(name, [one for one in params if one is not None], stages)]


def executor_taking(name: str, scalars: Scalars) -> Executor:
    """The executor of a name, for steps whose numbers come from there.

    Raises:
        ValueError: it takes no numbers from there.
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
    """Return the name of the executor that steps these parameters, purely or in place.

    ``auto``, which an optimizer has unless told otherwise, is another one on some devices, with the
    same bits: eager on CUDA, with few launches for all parameters in place of many for each; the
    reference on devices that no kernel was written for, and for DTensors whose stages need whole
    tensors, with which only the reference computes as they are. Every other name means what it
    says.

    Args:
        name: of the optimizer's executor.
        params: to be stepped.
        stages: that step them.
    """
    stand_ins = EXECUTORS[name].stand_ins
    if not stand_ins:
        return name
    on_shards = can_step_shards(stages)
    kinds = {
        "DTensor" if is_sharded(param) and not on_shards else param.device.type for param in params
    }
    if not kinds <= stand_ins.keys():
        return "reference"
    return stand_ins[kinds.pop()] if len(kinds) == 1 else name
