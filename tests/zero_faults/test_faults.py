"""Tests that our class is right where torch's installed ZeroRedundancyOptimizer is not.

The table of docs/zero.md says what torch's class does instead; test_page.py compares it. If torch's
side of a test fails here, torch has changed: fix the test, and update the page.
"""

from typing import Any

import pytest

from tests.choices import case
from tests.ranks import Outcomes

from .scenarios import STEP
from .sides import OURS, TORCH

TRAINED = {"moved": [12] * 6, "as plain": True}
"""Six iterations that each change all parameters, with the result of DDP with torch.optim."""
RIGHT: dict[str, Any] = {
    "iterations ": TRAINED,
    "iterations static_graph": TRAINED,
    "iterations find_unused_parameters": TRAINED,
    "learning_rates": {"moved at 0": [0, 0], "as plain": True},
    "refused_on_gloo": "",
    "several_groups": {"failed": None, "error": "", "as plain": True},
    "mixed_dtypes": {"error": "", "as plain": True},
    "saved_under_overlap": {"at first": "", "later": "", "entries": 12},
    "loaded_under_overlap": {"at first": ["", True], "later": ["", True]},
}
"""Expected result of each job for our class, on each of two ranks and with each hook."""


def results(outcomes: Outcomes, job: str) -> list[Any]:
    return [outcome.result() for outcome in outcomes[job]]


@pytest.mark.parametrize("job", RIGHT)
def test_ours_is_right_and_torchs_is_not(on_two: Outcomes, job: str) -> None:
    for side in OURS:
        with case(side=side):
            assert results(on_two, f"{job}, {side}") == [RIGHT[job]] * 2
    assert RIGHT[job] not in results(on_two, f"{job}, {TORCH}")


def test_ranks_of_a_subgroup(on_four: Outcomes) -> None:
    """Our class trains on a subgroup; torch's takes the rank in the world for the group rank."""
    for side in OURS:
        with case(side=side):
            assert results(on_four, f"on_subgroup, {side}") == [TRAINED, None, TRAINED, None]
    assert TRAINED not in results(on_four, f"on_subgroup, {TORCH}")


def test_the_dict_that_is_loaded_stays_whole(on_two: Outcomes) -> None:
    """torch's class removes other ranks' state from the caller's dict; ours does not."""
    for side, left in ((OURS[0], 12), (TORCH, 6)):
        wanted = {"before": 12, "after": left}
        assert results(on_two, f"callers_dict, {side}") == [wanted, wanted]


def test_nothing_is_pickled(on_four: Outcomes) -> None:
    """Our class pickles nothing, while in torch's three ranks write a pickle each.

    Three ranks read each of these pickles, though only one rank needs them.
    """
    ours, torchs = (results(on_four, f"pickles, {side}") for side in (OURS[0], TORCH))
    assert [(seen["written"], seen["read"]) for seen in ours] == [(0, 0)] * 4
    assert [seen["written"] for seen in torchs] == [0, 1, 1, 1]
    assert sum(seen["read"] for seen in torchs) == 9
    for ranks in (ours, torchs):
        assert [seen["entries"] for seen in ranks] == [12, None, None, None]


def test_small_parameters_are_sent_together(on_two: Outcomes) -> None:
    """Our class sends one broadcast for each owner; torch's sends one for each parameter."""
    assert results(on_two, f"broadcasts, {STEP}") == [12, 12]
    for side in OURS:
        assert results(on_two, f"broadcasts, {side}") == [2, 2]
