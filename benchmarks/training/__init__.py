"""``make convergence``: every algorithm trains on five small problems, pass or fail."""
