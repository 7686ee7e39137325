"""Tests of ZeroRedundancyOptimizer against torch's own class and against one process."""
