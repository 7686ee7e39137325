"""Tests of the benchmark: its measurements, contestants, targets and pages."""
