"""Account of an iteration, tested alone: every parameter is in exactly one bucket."""

from collections.abc import Sequence

import pytest

from hooks.buckets import BucketPosition
from hooks.driver import BucketDriver
from sharding.transport.local import LocalWorld
from tests.choices import case

NAMES = ("a", "b", "c", "d")


def driver_of(names: Sequence[str]) -> BucketDriver:
    group = LocalWorld(1).run(lambda group: group)[0]
    driver = BucketDriver(group, [], {}, may_leave_unused=False)
    driver.expect(names)
    return driver


def add(
    driver: BucketDriver,
    number: int,
    names: Sequence[str],
    *,
    last: bool = False,
    backward: int = -1,
) -> None:
    driver.add_bucket(BucketPosition(number, last, backward), names)


def run(driver: BucketDriver, buckets: Sequence[str]) -> None:
    for number, names in enumerate(buckets):
        add(driver, number, list(names), last=number == len(buckets) - 1)


def test_every_parameter_once_again_and_again() -> None:
    driver = driver_of(NAMES)
    for buckets in (["dc", "b", "a"], ["abcd"], ["c", "", "dba"]):
        run(driver, buckets)


WRONG: dict[str, tuple[Sequence[str], str]] = {
    "in two buckets": (["dc", "bc"], r"'c' came twice in one iteration"),
    "twice in a bucket": (["abb"], r"'b' came twice in one iteration"),
    "in none": (["d", "b"], r"never stepped: 'a', 'c'\. "),
    "most in none": ([""], r"never stepped: 'a', 'b', 'c', 'd'\. "),
}


def test_a_parameter_that_does_not_come_once_is_named() -> None:
    """The error names the parameter and ends the iteration, so the next one can begin."""
    for name, (buckets, text) in WRONG.items():
        driver = driver_of(NAMES)
        for _ in range(2):
            with case(wrong=name), pytest.raises(RuntimeError, match=text):
                run(driver, buckets)


def test_of_many_some_are_named() -> None:
    driver = driver_of([f"layer{number}" for number in range(8)])
    with pytest.raises(RuntimeError, match=r"'layer1', .*'layer5' and 2 more\. "):
        add(driver, 0, ["layer0"], last=True)


def test_an_iteration_cut_short_is_noticed_by_the_next() -> None:
    driver = driver_of(NAMES)
    add(driver, 0, ["d", "c"])
    with pytest.raises(RuntimeError, match=r"never stepped: 'a', 'b'\. .*from a checkpoint"):
        add(driver, 0, ["d", "c"])
    add(driver, 0, ["d", "c"])
    add(driver, 1, ["b", "a"], last=True)


def test_two_modules_in_one_backward_are_noticed() -> None:
    """Two modules that bring all parameters in one backward pass cause an error."""
    driver = driver_of(NAMES)
    add(driver, 0, NAMES, last=True, backward=7)
    with pytest.raises(RuntimeError, match=r"'a' came twice"):
        add(driver, 0, NAMES, last=True, backward=7)
    add(driver, 0, NAMES, last=True, backward=8)


def test_an_iteration_that_stepped_nothing_is_not_missed() -> None:
    driver = driver_of(NAMES)
    add(driver, 0, [])
    add(driver, 0, [])
    add(driver, 1, NAMES, last=True)
