"""What papers say of training with few means, tried in small: ``python -m benchmarks.claims``."""
