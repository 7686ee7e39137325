"""The executor by which the laws step: exact loops of any size, compiled at the first step."""

from functional_optim.kernels import EXECUTORS, ChunkExecutor, register_executor
from functional_optim.kernels.blocked import BlockedKernel
from functional_optim.kernels.exact import ExactKernel
from functional_optim.kernels.inductor import InductorKernel
from functional_optim.kernels.stacked import StackedExecutor

COMPILED = "compiled"
"""Its name, which exists where the suite is imported. ``auto`` compiles only where that pays."""

if COMPILED not in EXECUTORS:
    exact = ExactKernel()
    register_executor(
        COMPILED,
        ChunkExecutor(
            exact,
            InductorKernel(),
            BlockedKernel(),
            joining=exact,
            stacks=StackedExecutor(),
            on_device=True,
        ),
    )
