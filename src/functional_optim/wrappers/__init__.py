"""Stages around an optimizer: what runs when, and what is kept of the way that parameters went."""

from functional_optim.core.constructor import links_constructors
from functional_optim.wrappers.accumulate import accumulate
from functional_optim.wrappers.apply_if_finite import apply_if_finite
from functional_optim.wrappers.ema import ema
from functional_optim.wrappers.lookahead import lookahead
from functional_optim.wrappers.sam import sam

__all__ = ["accumulate", "apply_if_finite", "ema", "lookahead", "sam"]

links_constructors(accumulate, apply_if_finite, ema, lookahead, sam)
