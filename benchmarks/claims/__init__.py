"""Papers' claims on training with few means, tried in small: ``python -m benchmarks.claims``."""
