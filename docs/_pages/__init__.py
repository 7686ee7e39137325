"""Pages that are generated from the code, one module each or a few."""
