"""Data-parallel training where not every rank has a compiler, on real processes."""
