"""``make bench``: how fast the executors are, as ratios to peers timed in the same run."""
