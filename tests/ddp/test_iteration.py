"""The account of an iteration, by itself: every parameter in exactly one bucket."""

import pytest

from hooks.iteration import Iteration

NAMES = ("a", "b", "c", "d")


def test_every_parameter_once_again_and_again() -> None:
    iteration = Iteration(NAMES)
    for buckets in (
        (["d", "c"], ["b"], ["a"]),
        (["a", "b", "c", "d"],),
        (["c"], [], ["d", "b", "a"]),
    ):
        for index, names in enumerate(buckets):
            iteration.enter(index, list(names))
        iteration.finish()


def test_a_parameter_in_two_buckets_is_named() -> None:
    iteration = Iteration(NAMES)
    iteration.enter(0, ["d", "c"])
    with pytest.raises(RuntimeError, match=r"'c' came twice in one iteration"):
        iteration.enter(1, ["b", "c"])


def test_a_parameter_twice_in_a_bucket_is_named() -> None:
    iteration = Iteration(NAMES)
    with pytest.raises(RuntimeError, match=r"'b' came twice in one iteration"):
        iteration.enter(0, ["a", "b", "b"])


def test_parameters_in_no_bucket_are_named() -> None:
    iteration = Iteration(NAMES)
    iteration.enter(0, ["d"])
    iteration.enter(1, ["b"])
    with pytest.raises(RuntimeError, match=r"never stepped: 'a', 'c'\. "):
        iteration.finish()


def test_of_many_some_are_named() -> None:
    iteration = Iteration([f"layer{number}" for number in range(8)])
    iteration.enter(0, ["layer0"])
    with pytest.raises(RuntimeError, match=r"'layer1', .*'layer5' and 2 more\. "):
        iteration.finish()


def test_an_iteration_cut_short_is_noticed_by_the_next() -> None:
    iteration = Iteration(NAMES)
    iteration.enter(0, ["d", "c"])
    with pytest.raises(RuntimeError, match=r"never stepped: 'a', 'b'\. .*from a checkpoint"):
        iteration.enter(0, ["d", "c"])


def test_two_modules_in_one_backward_are_noticed() -> None:
    """Both bring all parameters, in one bucket each."""
    iteration = Iteration(NAMES)
    iteration.enter(0, NAMES, backward=7)
    iteration.finish()
    with pytest.raises(RuntimeError, match=r"'a' came twice"):
        iteration.enter(0, NAMES, backward=7)
    iteration.enter(0, NAMES, backward=8)
    iteration.finish()


@pytest.mark.parametrize("index", [0, 1])
def test_after_an_error_an_iteration_begins_anew(index: int) -> None:
    iteration = Iteration(NAMES)
    iteration.enter(0, ["d", "c"])
    with pytest.raises(RuntimeError):
        iteration.enter(index, ["d"])
    iteration.enter(0, ["d", "c"])
    with pytest.raises(RuntimeError):
        iteration.finish()
    iteration.enter(0, ["d", "c"])
    iteration.enter(1, ["b", "a"])
    iteration.finish()
