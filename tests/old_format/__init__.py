"""Tests of folders that ``ZeroRedundancyOptimizer.save`` wrote: read, converted, refused.

``saved/`` has folders that the writer made before it was removed. A file beside each folder has
the state and the parameters of that run.
"""
