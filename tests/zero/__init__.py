"""ZeroRedundancyOptimizer: on real processes, beside torch's own and beside one process."""
