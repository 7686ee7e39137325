"""The public law suite over everything that is registered."""
