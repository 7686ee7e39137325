"""Tests that DTensors on one rank are stepped as by torch, or refused.

``tests/dtensor`` has the same tests with several ranks.
"""

import pytest

from tests.choices import pairs
from tests.dtensor import jobs, numbers

pytestmark = pytest.mark.usefixtures("world_of_one")


def test_stepped_as_torch_steps_them() -> None:
    jobs.adamw_as_torch(
        pairs(model=["by hand", "fsdp"], dtype=["float32"], executor=["reference", "blocked"])
    )


def test_a_number_for_a_parameter_is_the_same_on_all_ranks() -> None:
    numbers.as_torch()


def test_what_cannot_step_a_shard_says_so() -> None:
    """The error names the parameter and an alternative, and changes nothing."""
    jobs.refused()


def test_what_they_are_given_beside_gradients_is_sharded_as_they_are() -> None:
    jobs.with_inputs()


def test_one_shard_at_two_places() -> None:
    """Two DTensors of one shard are refused, because they share memory."""
    jobs.twice()


def test_gradients_may_be_cut_otherwise() -> None:
    jobs.redistributed()
