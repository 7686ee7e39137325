"""Measurements of the benchmark on the ranks that all tests share."""
