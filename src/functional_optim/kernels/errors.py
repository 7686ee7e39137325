"""Errors of chains that cannot be written as a graph, or run on elements."""


class UntraceableError(TypeError):
    """A chain that cannot be written as a graph; the text says why."""


class NotPointwiseError(ValueError):
    """A chain that says it is pointwise, and looks at more than one element at a time."""


class UnscriptableError(TypeError):
    """A chain that TorchScript does not take; the text names the stage, and says why."""
