"""Tests that the calls of the constructor and of state dicts grow linearly with the parameters."""

from collections.abc import Callable

import pytest
import torch

from sharding import ZeroRedundancyOptimizer
from tests.choices import case
from tests.steady import calls_of

from .alone import params

pytestmark = pytest.mark.usefixtures("world_of_one")


def is_proportional(calls: Callable[[int], int]) -> bool:
    """Return True if each further parameter costs equally many calls."""
    calls(20)  # the first call imports modules
    few, more, most = calls(20), calls(40), calls(80)
    return more > few and most - more == 2 * (more - few)


def test_constructor_and_state() -> None:
    """Fault 37: constructor, state_dict and load_state_dict take linearly many calls."""

    def made(count: int) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(params(*[3] * count), torch.optim.AdamW)

    with case(what="constructor"):
        assert is_proportional(lambda count: calls_of(lambda: made(count), "sharding"))

    def goes_on(zero: ZeroRedundancyOptimizer) -> None:
        zero.load_state_dict(zero.state_dict())

    for what in (ZeroRedundancyOptimizer.state_dict, goes_on):
        with case(what=what.__name__):

            def calls(count: int, what: Callable[..., object] = what) -> int:
                zero = made(count)
                return calls_of(lambda: what(zero), "sharding")

            assert is_proportional(calls)
