"""Ways of running a chain over many leaves. Which one is a matter of speed, never of results."""

from collections.abc import Iterable
from typing import Literal

from torch import Tensor

from functional_optim.dtensors import is_sharded
from functional_optim.executors.auto import AutoKernel
from functional_optim.executors.blocked import BlockedKernel
from functional_optim.executors.exact import ExactKernel
from functional_optim.executors.fused import FusedKernel
from functional_optim.executors.inductor import InductorKernel
from functional_optim.executors.lane_executor import LaneExecutor
from functional_optim.executors.leaf import Executor, Leaf, Stepped, is_measured, needs_total
from functional_optim.executors.reference import ReferenceExecutor
from functional_optim.executors.script import ScriptExecutor
from functional_optim.executors.stacked import StackedExecutor

ExecutorName = Literal["auto", "reference", "script", "blocked", "compile", "stacked", "fused"]

_AUTO, _EXACT, _STACKS = AutoKernel(), ExactKernel(), StackedExecutor(exact=True)

EXECUTORS: dict[str, Executor] = {
    "auto": LaneExecutor(_AUTO, joining=_AUTO, stacks=_STACKS),
    "reference": ReferenceExecutor(),
    "script": ScriptExecutor(),
    "blocked": LaneExecutor(BlockedKernel(), stacks=_STACKS),
    "compile": LaneExecutor(
        _EXACT, InductorKernel(), BlockedKernel(), joining=_EXACT, stacks=_STACKS
    ),
    "stacked": LaneExecutor(_AUTO, joining=_AUTO, stacks=StackedExecutor(exact=False)),
    "fused": LaneExecutor(FusedKernel(), strict=True),
}


def in_place(name: ExecutorName, params: Iterable[Tensor]) -> ExecutorName:
    """The executor for a front-end that steps these parameters in place.

    On the CPU, auto stands in for the reference, which an optimizer has unless told otherwise: it
    gives the same bits, and no temporaries as large as a parameter. Only the reference computes
    with DTensors as they are.
    """
    on_cpu = name == "reference" and all(map(_is_plain_cpu, params))
    return "auto" if on_cpu else name


def _is_plain_cpu(param: Tensor) -> bool:
    return param.is_cpu and not is_sharded(param)


__all__ = [
    "EXECUTORS",
    "Executor",
    "ExecutorName",
    "LaneExecutor",
    "Leaf",
    "ReferenceExecutor",
    "ScriptExecutor",
    "Stepped",
    "in_place",
    "is_measured",
    "needs_total",
]
