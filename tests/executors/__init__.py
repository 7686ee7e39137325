"""Tests of the executors, which run a chain."""
