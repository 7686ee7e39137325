"""Pages of the documentation."""
