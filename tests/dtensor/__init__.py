"""Tests of DTensor parameters, which are stepped shard by shard on real processes."""
