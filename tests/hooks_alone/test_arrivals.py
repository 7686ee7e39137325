"""Index of each bucket in its iteration, tested without DDP."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from hooks import buckets as buckets_module
from hooks.buckets import BucketPosition, BucketPositions

PARAMS = {name: torch.empty(()) for name in "abcde"}


class Bucket(NamedTuple):
    """Stand-in for DDP's bucket: an index, parameters, and a flag for the last bucket."""

    number: int
    is_the_last: bool
    names: str

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.is_the_last

    def parameters(self) -> list[Tensor]:
        return [PARAMS[name] for name in self.names]


def places(arrivals: BucketPositions, backward: int, *buckets: Bucket) -> list[tuple[int, bool]]:
    """Return the positions of buckets that come in one backward pass."""
    with mock.patch.object(buckets_module, "current_graph_task_id", return_value=backward):
        made: Sequence[Any] = buckets
        found: list[BucketPosition] = [arrivals.position_of(bucket) for bucket in made]
    assert {place.backward for place in found} == {backward}
    return [(place.number, place.last) for place in found]


def arrivals_of(names: str = "abcde") -> BucketPositions:
    return BucketPositions(PARAMS[name] for name in names)


SEVERAL = (Bucket(0, False, "ed"), Bucket(1, False, "c"), Bucket(2, True, "ba"))
FIRST_OF_STATIC = (Bucket(0, False, "b"), Bucket(0, False, "aed"), Bucket(0, False, "c"))


def test_what_ddp_says() -> None:
    arrivals = arrivals_of()
    for backward in range(3):
        assert places(arrivals, backward, *SEVERAL) == [(0, False), (1, False), (2, True)]
        assert places(arrivals, backward + 10, Bucket(0, True, "abcde")) == [(0, True)]


def test_the_first_iteration_of_a_static_graph() -> None:
    """In this iteration, DDP gives all buckets the index 0, and calls none the last."""
    arrivals = arrivals_of()
    assert places(arrivals, 4, *FIRST_OF_STATIC) == [(0, False), (1, False), (2, True)]
    assert places(arrivals, 5, *SEVERAL) == [(0, False), (1, False), (2, True)]


def test_a_first_iteration_that_was_cut_short() -> None:
    arrivals = arrivals_of()
    assert places(arrivals, 4, *FIRST_OF_STATIC[:2]) == [(0, False), (1, False)]
    assert places(arrivals, 5, *FIRST_OF_STATIC) == [(0, False), (1, False), (2, True)]


def test_another_module_with_these_parameters_in_the_same_pass() -> None:
    """The other module begins its own iteration, which the account of parameters then refuses."""
    arrivals = arrivals_of()
    assert places(arrivals, 4, SEVERAL[0], SEVERAL[0]) == [(0, False), (0, False)]


def test_outside_of_a_backward_pass_all_is_as_ddp_says() -> None:
    assert places(arrivals_of(), -1, *FIRST_OF_STATIC) == [(0, False)] * 3
