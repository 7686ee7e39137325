"""Hand-written tests of the pure core, one file per module or behaviour."""
