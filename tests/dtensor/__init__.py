"""Parameters that are DTensors: stepped shard by shard, on real processes."""
