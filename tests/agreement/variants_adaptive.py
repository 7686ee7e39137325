"""Other implementations of adaptive algorithms with one thing changed, to show a cause."""
