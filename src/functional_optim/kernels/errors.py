"""Errors of chains that cannot be traced, scripted, or split into elements."""


class UntraceableError(TypeError):
    """A chain cannot be traced into a graph; the text says why."""


class NotPointwiseError(ValueError):
    """A chain declares that it is pointwise, but computes with more than one element at a time."""


class UnscriptableError(TypeError):
    """TorchScript cannot compile a chain; the text names the stage, and says why."""
