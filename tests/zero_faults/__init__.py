"""Faults of torch's ZeroRedundancyOptimizer, run beside ours on real processes."""
