"""Folders that ``ZeroRedundancyOptimizer.save`` wrote: read, rewritten, refused.

``saved/`` has folders that the writer made before it was removed, and beside each a file with the
state and the parameters of that run.
"""
