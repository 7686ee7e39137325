"""Ranges that torch.profiler shows by name, and that cost nothing while nobody profiles."""

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

from functional_optim._torch import is_profiling


def named_range(name: str) -> AbstractContextManager[object]:
    """Show the body of a with statement under this name, if a profiler is active.

    Args:
        name: begins with ``functional_optim.``, as those of this project do.
    """
    return profiler.record_function(name) if is_profiling() else nullcontext()
