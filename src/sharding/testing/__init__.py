"""Ranks to test with: real processes that are handed functions, and worlds inside one process."""

from sharding.testing.rank_pool import RankPool
from sharding.testing.results import Outcome
from sharding.testing.where import at

__all__ = ["Outcome", "RankPool", "at"]
