"""Steps compiled from a traced chain that give the bits of torch's own operations."""

from functional_optim.kernels.exact.kernel import ExactKernel

__all__ = ["ExactKernel"]
