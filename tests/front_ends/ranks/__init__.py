"""Tests under torch's own front-ends, in several processes."""
