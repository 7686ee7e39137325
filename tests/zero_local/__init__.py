"""Tests of sharded optimizers and hooks on ranks that are threads of one process."""
