"""ZeroRedundancyOptimizer: shards of state and steps on each rank, gathers of parameters."""
