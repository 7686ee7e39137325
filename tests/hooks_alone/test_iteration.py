"""Account of an iteration, tested alone: every parameter is in exactly one bucket."""

from collections.abc import Sequence

import pytest

from hooks.driver import Iteration
from tests.choices import case

NAMES = ("a", "b", "c", "d")


def run(iteration: Iteration, buckets: Sequence[str]) -> None:
    for index, names in enumerate(buckets):
        iteration.add_bucket(index, list(names))
    iteration.finish()


def test_every_parameter_once_again_and_again() -> None:
    iteration = Iteration(NAMES)
    for buckets in (["dc", "b", "a"], ["abcd"], ["c", "", "dba"]):
        run(iteration, buckets)


WRONG: dict[str, tuple[Sequence[str], str]] = {
    "in two buckets": (["dc", "bc"], r"'c' came twice in one iteration"),
    "twice in a bucket": (["abb"], r"'b' came twice in one iteration"),
    "in none": (["d", "b"], r"never stepped: 'a', 'c'\. "),
    "most in none": ([""], r"never stepped: 'a', 'b', 'c', 'd'\. "),
}


def test_a_parameter_that_does_not_come_once_is_named() -> None:
    """The error names the parameter and ends the iteration, so the next one can begin."""
    for name, (buckets, text) in WRONG.items():
        iteration = Iteration(NAMES)
        for _ in range(2):
            with case(wrong=name), pytest.raises(RuntimeError, match=text):
                run(iteration, buckets)


def test_of_many_some_are_named() -> None:
    iteration = Iteration([f"layer{number}" for number in range(8)])
    iteration.add_bucket(0, ["layer0"])
    with pytest.raises(RuntimeError, match=r"'layer1', .*'layer5' and 2 more\. "):
        iteration.finish()


def test_an_iteration_cut_short_is_noticed_by_the_next() -> None:
    iteration = Iteration(NAMES)
    iteration.add_bucket(0, ["d", "c"])
    with pytest.raises(RuntimeError, match=r"never stepped: 'a', 'b'\. .*from a checkpoint"):
        iteration.add_bucket(0, ["d", "c"])
    iteration.add_bucket(0, ["d", "c"])
    iteration.add_bucket(1, ["b", "a"])
    iteration.finish()


def test_two_modules_in_one_backward_are_noticed() -> None:
    """Two modules that bring all parameters in one backward pass cause an error."""
    iteration = Iteration(NAMES)
    iteration.add_bucket(0, NAMES, backward=7)
    iteration.finish()
    with pytest.raises(RuntimeError, match=r"'a' came twice"):
        iteration.add_bucket(0, NAMES, backward=7)
    iteration.add_bucket(0, NAMES, backward=8)
    iteration.finish()
