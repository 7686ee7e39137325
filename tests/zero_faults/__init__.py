"""What goes wrong with torch's ZeroRedundancyOptimizer, beside ours, on real processes."""
