"""Tests of the benchmark: what it measures, beside whom, and what it makes of that."""
