"""Executor ``compiled`` of the laws: compiled loops for tensors of any size, built at once."""

from functional_optim.kernels import EXECUTORS, ChunkExecutor, register_executor
from functional_optim.kernels.blocked_kernel import BlockedKernel
from functional_optim.kernels.exact import ExactKernel
from functional_optim.kernels.inductor import InductorKernel
from functional_optim.kernels.stacks import StackStepper

COMPILED = "compiled"
"""Name of the executor, which an import of this module registers. Unlike ``auto``, it also compiles
steps of few elements."""

if COMPILED not in EXECUTORS:
    exact = ExactKernel()
    register_executor(
        COMPILED,
        ChunkExecutor(
            exact,
            InductorKernel(),
            BlockedKernel(),
            joining=exact,
            stacks=StackStepper(),
            on_device=True,
        ),
    )
