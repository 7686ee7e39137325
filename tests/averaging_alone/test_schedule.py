"""Schedules of averaging: the steps at which parameters are averaged."""

from itertools import product

import pytest

from hooks import AveragingSchedule
from tests.choices import case


def test_one_period_is_that_of_torch() -> None:
    for period, warmup in product([1, 2, 4, 7], [0, 3, 12]):
        schedule = AveragingSchedule(period, warmup=warmup)
        for step in range(40):
            with case(period=period, warmup=warmup, step=step):
                due = step >= warmup and (step - warmup) % period == 0
                assert schedule.level(step) == (0 if due else None)


def test_the_largest_period_that_is_due_wins() -> None:
    schedule = AveragingSchedule((2, 3, 6), (2, 4, None))
    assert [schedule.level(step) for step in range(13)] == (
        [2, None, 0, 1, 0, None, 2, None, 0, 1, 0, None, 2]
    )
    assert schedule.shortest_gap == 1
    assert AveragingSchedule((4, 8), (2, None)).shortest_gap == 4


def test_raw_steps_are_counted_from_the_first() -> None:
    raw = AveragingSchedule((2, 4), (2, None), warmup=3, raw=True)
    assert [raw.level(step) for step in range(9)] == [None] * 3 + [None, 1, None, 0, None, 1]
    assert AveragingSchedule.of_groups({2: 2, 4: None}, warmup=3, raw=True) == raw


def test_counts_are_the_levels_counted() -> None:
    schedule = AveragingSchedule((2, 6), (2, None), warmup=5)
    assert schedule.counts(5) == [0, 0]
    assert schedule.counts(6) == [0, 1]
    assert schedule.counts(18) == [4, 3]


def test_what_makes_no_schedule_is_refused() -> None:
    for arguments, message in [
        ({"periods": 0}, r"periods must be .* from 1 on, got \(0,\)"),
        ({"periods": ()}, "periods must be"),
        ({"periods": (4, 2), "group_sizes": (2, None)}, r"must ascend.*got \(4, 2\)"),
        ({"periods": (2, 2), "group_sizes": (2, None)}, "must ascend"),
        ({"periods": 2, "warmup": -1}, "warmup must be .* got -1"),
        ({"periods": (2, 4)}, r"one size for each of the periods \(2, 4\), got \(None,\)"),
        ({"periods": (2, 4), "group_sizes": (None, 2)}, "with None, for all ranks, at most"),
        ({"periods": (2, 4), "group_sizes": (4, 2)}, r"got \(4, 2\)"),
        ({"periods": (2, 4), "group_sizes": (0, 2)}, "ascend from 1 on"),
    ]:
        with case(arguments=arguments), pytest.raises(ValueError, match=message):
            AveragingSchedule(**arguments)


def test_torch_counts_the_hierarchy_raw_and_the_period_from_the_warm_up() -> None:
    """torch's hierarchical averager counts raw steps; its periodic one counts from the warm-up."""
    assert AveragingSchedule.of_groups({4: 2}, warmup=10, raw=True).counts(20) == [2]  # 12, 16
    assert AveragingSchedule(4, warmup=10).counts(20) == [3]  # 10, 14, 18
