"""Each fault of torch's ZeroRedundancyOptimizer, as it is in the torch that is installed; not ours.

Where torch's side of a test fails, torch has changed: mend the test, and say so in the README.
"""

from typing import Any

import pytest

from tests.ranks import Outcomes

from .scenarios import STEP
from .sides import OURS, TORCH

ALL = [12] * 6
"""Six iterations, each of which changes all parameters."""


def results(outcomes: Outcomes, job: str) -> list[Any]:
    return [outcome.result() for outcome in outcomes[job]]


LOST = {"": [0, 0, 12, 12, 12, 12], "static_graph": [0, 0, 0, 12, 12, 12]}


@pytest.mark.parametrize("option", LOST)
def test_torch_loses_the_first_iterations(on_two: Outcomes, option: str) -> None:
    for seen in results(on_two, f"iterations {option}, {TORCH}"):
        assert seen == {"moved": LOST[option], "as plain": False}


def test_torch_never_updates_with_find_unused_parameters(on_two: Outcomes) -> None:
    for seen in results(on_two, f"iterations find_unused_parameters, {TORCH}"):
        assert seen == {"moved": [0] * 6, "as plain": False}


@pytest.mark.parametrize("option", [*LOST, "find_unused_parameters"])
@pytest.mark.parametrize("side", OURS)
def test_ours_updates_from_the_first_iteration(on_two: Outcomes, side: str, option: str) -> None:
    for seen in results(on_two, f"iterations {option}, {side}"):
        assert seen == {"moved": ALL, "as plain": True}


def test_torch_never_updates_a_rank_of_a_subgroup(on_four: Outcomes) -> None:
    """It takes a rank's number in the world for that in the group."""
    zero, one, two, three = results(on_four, f"on_subgroup, {TORCH}")
    assert one is three is None
    assert zero == two
    assert zero["moved"][:2] == [0, 0]
    assert len(set(zero["moved"][2:])) == 1 and 0 < zero["moved"][-1] < 12
    assert not zero["as plain"]


@pytest.mark.parametrize("side", OURS)
def test_ours_updates_all_of_a_subgroup(on_four: Outcomes, side: str) -> None:
    right = {"moved": ALL, "as plain": True}
    assert results(on_four, f"on_subgroup, {side}") == [right, None, right, None]


def test_torch_ignores_learning_rates_under_overlap(on_two: Outcomes) -> None:
    for seen in results(on_two, f"learning_rates, {TORCH}"):
        assert seen == {"moved at 0": [12, 12], "as plain": False}


@pytest.mark.parametrize("side", OURS)
def test_ours_reads_learning_rates_at_each_step(on_two: Outcomes, side: str) -> None:
    for seen in results(on_two, f"learning_rates, {side}"):
        assert seen == {"moved at 0": [0, 0], "as plain": True}


def test_torch_saves_nothing_under_overlap(on_two: Outcomes) -> None:
    for seen in results(on_two, f"saved_under_overlap, {TORCH}"):
        assert seen["at first"].startswith("RuntimeError: This method should not be called until")
        assert seen["later"].startswith("AttributeError: ")
        assert "state_dict" in seen["later"]
        assert seen["entries"] == 0


@pytest.mark.parametrize("side", OURS)
def test_ours_saves_under_overlap(on_two: Outcomes, side: str) -> None:
    for seen in results(on_two, f"saved_under_overlap, {side}"):
        assert seen == {"at first": "", "later": "", "entries": 12}


def test_torch_does_not_load_where_training_begins(on_two: Outcomes) -> None:
    for seen in results(on_two, f"loaded_under_overlap, {TORCH}"):
        error, right = seen["at first"]
        assert error.startswith("RuntimeError: This method should not be called until")
        assert not right
        assert seen["later"] == ["", True]


@pytest.mark.parametrize("side", OURS)
def test_ours_loads_under_overlap(on_two: Outcomes, side: str) -> None:
    for seen in results(on_two, f"loaded_under_overlap, {side}"):
        assert seen == {"at first": ["", True], "later": ["", True]}


def test_torch_refuses_gloo(on_two: Outcomes) -> None:
    for text in results(on_two, f"refused_on_gloo, {TORCH}"):
        assert text.startswith("RuntimeError: Gloo backend")


@pytest.mark.parametrize("side", OURS)
def test_ours_takes_gloo(on_two: Outcomes, side: str) -> None:
    assert results(on_two, f"refused_on_gloo, {side}") == ["", ""]


def test_torch_fails_in_the_third_backward_with_two_groups(on_two: Outcomes) -> None:
    for seen in results(on_two, f"several_groups, {TORCH}"):
        assert seen["failed"] == 3
        assert "single parameter group" in seen["error"]


@pytest.mark.parametrize("side", OURS)
def test_ours_takes_groups(on_two: Outcomes, side: str) -> None:
    for seen in results(on_two, f"several_groups, {side}"):
        assert seen == {"failed": None, "error": "", "as plain": True}


def test_torch_refuses_mixed_dtypes(on_two: Outcomes) -> None:
    for seen in results(on_two, f"mixed_dtypes, {TORCH}"):
        assert seen["error"].startswith("ValueError: ")
        assert "same dense type" in seen["error"]


@pytest.mark.parametrize("side", OURS)
def test_ours_takes_mixed_dtypes(on_two: Outcomes, side: str) -> None:
    for seen in results(on_two, f"mixed_dtypes, {side}"):
        assert seen == {"error": "", "as plain": True}


def test_torch_destroys_the_dict_that_it_loads(on_two: Outcomes) -> None:
    """What other ranks own is gone from it."""
    for seen in results(on_two, f"callers_dict, {TORCH}"):
        assert seen == {"before": 12, "after": 6}


def test_ours_leaves_the_dict_that_it_loads(on_two: Outcomes) -> None:
    for seen in results(on_two, f"callers_dict, {OURS[0]}"):
        assert seen == {"before": 12, "after": 12}


def test_torch_broadcasts_pickles_to_all(on_four: Outcomes) -> None:
    """Three ranks write one each; three ranks read each of them, of which one needed it."""
    ranks = results(on_four, f"pickles, {TORCH}")
    assert [seen["written"] for seen in ranks] == [0, 1, 1, 1]
    assert [seen["entries"] for seen in ranks] == [12, None, None, None]
    assert sum(seen["read"] for seen in ranks) == 9


def test_ours_pickles_nothing(on_four: Outcomes) -> None:
    ranks = results(on_four, f"pickles, {OURS[0]}")
    assert [(seen["written"], seen["read"]) for seen in ranks] == [(0, 0)] * 4
    assert [seen["entries"] for seen in ranks] == [12, None, None, None]


def test_torch_broadcasts_parameters_one_by_one(on_two: Outcomes) -> None:
    """Without overlap; its hook sends one tensor for each bucket."""
    assert results(on_two, f"broadcasts, {STEP}") == [12, 12]


@pytest.mark.parametrize("side", OURS)
def test_ours_sends_small_parameters_together(on_two: Outcomes, side: str) -> None:
    """One broadcast for each owner, as they are in one bucket."""
    assert results(on_two, f"broadcasts, {side}") == [2, 2]
