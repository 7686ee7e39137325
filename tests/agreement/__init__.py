"""Algorithms against formulas and against programs of other authors."""
