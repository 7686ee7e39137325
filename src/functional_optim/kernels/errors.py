"""Errors of chains that cannot be traced, scripted, or split, and of rules that are not pure."""


class UntraceableError(TypeError):
    """A chain cannot be traced into a graph; the text says why."""


class NotPointwiseError(ValueError):
    """A chain declares that it is pointwise, but computes with more than one element at a time."""


class NotPureError(RuntimeError):
    """A rule or a transform wrote to its arguments; the text names the argument."""


class UnscriptableError(TypeError):
    """TorchScript cannot compile a chain; the text names the stage, and says why."""
