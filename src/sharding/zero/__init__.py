"""ZeroRedundancyOptimizer, in parts: what is owned, stepped, gathered, saved and loaded."""
