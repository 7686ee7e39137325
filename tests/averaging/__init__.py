"""Model averaging on real processes."""
