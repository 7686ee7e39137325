"""Tests of faults of torch's ZeroRedundancyOptimizer, beside ours on real processes."""
