"""Ratios are taken within rounds, and then summed up by their median, least and greatest value."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import contestants as who
from benchmarks.ratios import Against, Spread, against_best, ratio, short, spread
from benchmarks.records import Cell, Heat
from tests.choices import examples

TIMES = st.floats(1e-7, 1e3)


@examples(15)
@given(st.lists(st.tuples(TIMES, TIMES), min_size=1))
def test_a_spread_holds_the_ratio_of_every_round(rounds: list[tuple[float, float]]) -> None:
    found = spread([a for a, _ in rounds], [b for _, b in rounds])
    ratios = [a / b for a, b in rounds]
    assert found.least == min(ratios)
    assert found.greatest == max(ratios)
    assert found.least <= found.median <= found.greatest


@examples(10)
@given(st.lists(TIMES, min_size=1), st.floats(0.25, 8.0))
def test_what_slows_a_whole_round_changes_no_ratio(times: list[float], factor: float) -> None:
    weather = [1.0 + index for index in range(len(times))]
    ours = [time * factor * now for time, now in zip(times, weather, strict=True)]
    theirs = [time * now for time, now in zip(times, weather, strict=True)]
    found = spread(ours, theirs)
    assert found.least == pytest.approx(factor)
    assert found.greatest == pytest.approx(factor)


def test_rounds_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        spread([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        spread([], [])


def test_rounds_of_all_heats_that_have_both_are_pooled() -> None:
    heats = [
        Heat("a", {"x": [1.0, 2.0], "y": [1.0, 1.0]}),
        Heat("b", {"x": [30.0], "z": [1.0]}),
        Heat("c", {"x": [6.0], "y": [2.0]}),
    ]
    cell = Cell("w", "o", "cpu", heats)
    assert ratio(cell, "x", "y") == Spread(2.0, 1.0, 3.0)
    assert ratio(cell, "y", "z") is None


def test_the_best_peer_is_the_one_that_is_hardest_to_beat() -> None:
    seconds = {who.AUTO: [2.0], who.FUSED: [1.0], who.LOOP: [8.0], who.FLOOR: [0.1]}
    cell = Cell("w", "o", "cpu", [Heat("a", seconds)])
    assert against_best(cell, who.AUTO) == Against(who.FUSED, Spread(2.0, 2.0, 2.0))
    assert against_best(cell, who.AUTO, (who.TORCHOPT,)) is None


def test_ratios_have_the_digits_that_say_something() -> None:
    assert [*map(short, (1234.5, 45.67, 1.234, 0.0123))] == ["1,234", "45.7", "1.23", "0.012"]
