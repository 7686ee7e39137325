"""Optimizer: a chain, and the ways of stepping parameters by it."""

from functional_optim.optimizer.optimizer import Optimizer

__all__ = ["Optimizer"]
