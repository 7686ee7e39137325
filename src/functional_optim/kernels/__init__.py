"""Executors and kernels, which run a chain over many leaves. They differ in speed."""

from functional_optim.core.leaf import Leaf, Scalars, Stepped, is_measured, needs_total
from functional_optim.kernels.executor import Chunks, Executor
from functional_optim.kernels.kernel_executor import KernelExecutor
from functional_optim.kernels.reference import ReferenceExecutor
from functional_optim.kernels.table import (
    EXECUTORS,
    ExecutorName,
    check_executor,
    executor_for,
    executor_taking,
    in_place,
    register_executor,
)
from functional_optim.kernels.totals import total_of

__all__ = [
    "EXECUTORS",
    "Chunks",
    "Executor",
    "ExecutorName",
    "KernelExecutor",
    "Leaf",
    "ReferenceExecutor",
    "Scalars",
    "Stepped",
    "check_executor",
    "executor_for",
    "executor_taking",
    "in_place",
    "is_measured",
    "needs_total",
    "register_executor",
    "total_of",
]
