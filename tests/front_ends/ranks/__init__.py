"""Under torch's own front-ends, in several processes."""
