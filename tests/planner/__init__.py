"""Tests of the sharding planner."""
