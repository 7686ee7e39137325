"""Ways of running a chain over many leaves. Which one is a matter of speed, never of results."""

from typing import Literal

from functional_optim.executors.auto import AutoKernel
from functional_optim.executors.blocked import BlockedKernel
from functional_optim.executors.exact import ExactKernel
from functional_optim.executors.fused import FusedKernel
from functional_optim.executors.inductor import InductorKernel
from functional_optim.executors.lane_executor import LaneExecutor
from functional_optim.executors.leaf import Executor, Leaf, Stepped, is_measured
from functional_optim.executors.reference import ReferenceExecutor
from functional_optim.executors.script import ScriptExecutor

ExecutorName = Literal["auto", "reference", "script", "blocked", "compile", "fused"]

_AUTO, _EXACT = AutoKernel(), ExactKernel()

EXECUTORS: dict[str, Executor] = {
    "auto": LaneExecutor(_AUTO, joining=_AUTO),
    "reference": ReferenceExecutor(),
    "script": ScriptExecutor(),
    "blocked": LaneExecutor(BlockedKernel()),
    "compile": LaneExecutor(_EXACT, InductorKernel(), BlockedKernel(), joining=_EXACT),
    "fused": LaneExecutor(FusedKernel(), strict=True),
}

__all__ = [
    "EXECUTORS",
    "Executor",
    "ExecutorName",
    "LaneExecutor",
    "Leaf",
    "ReferenceExecutor",
    "ScriptExecutor",
    "Stepped",
    "is_measured",
]
