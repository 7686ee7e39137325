"""Executor ``compiled`` of the laws: compiled loops for tensors of any size, built at once."""

from functional_optim.kernels import EXECUTORS, KernelExecutor, register_executor
from functional_optim.kernels.exact import ExactKernel
from functional_optim.kernels.foreach import ForeachKernel
from functional_optim.kernels.inductor import InductorKernel

COMPILED = "compiled"
"""Name of the executor, which an import of this module registers. Unlike ``auto``, it also compiles
steps of few elements."""

if COMPILED not in EXECUTORS:
    exact = ExactKernel()
    register_executor(
        COMPILED,
        KernelExecutor(
            exact,
            InductorKernel(),
            ForeachKernel(),
            joining=exact,
            stacks=True,
            on_device=True,
        ),
    )
