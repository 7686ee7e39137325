"""Named ranges in traces of torch.profiler, without cost if no profiler is active."""

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

from functional_optim._torch.distributed import is_profiling


def named_range(name: str) -> AbstractContextManager[object]:
    """Return a context that shows its body under this name, if a profiler is active."""
    return profiler.record_function(name) if is_profiling() else nullcontext()
