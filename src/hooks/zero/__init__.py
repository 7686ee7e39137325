"""Hooks that step a ZeroRedundancyOptimizer during DDP's backward pass."""
