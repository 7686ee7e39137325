"""Ranks for tests: a pool of real processes that run functions in a process group."""

from sharding.testing.rank_pool import RankPool
from sharding.testing.rank_process import Outcome, at

__all__ = ["Outcome", "RankPool", "at"]
