"""Optimizer: a chain, and the ways to step parameters with it."""

from functional_optim.optimizer.optimizer import Optimizer

__all__ = ["Optimizer"]
