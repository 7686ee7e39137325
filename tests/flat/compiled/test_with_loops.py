"""Laws of flat buffers where the loops in C++ look at tensors and copy gradients."""

import pytest

from ..test_check import (
    test_autograd_is_told_by_who_writes_and_not_by_who_looks,
    test_the_first_that_left_is_named,
)
from ..test_gradients import (
    test_gather_brings_every_gradient_to_its_place,
    test_gather_from_gradients_that_lie_in_the_buffers,
    test_gather_refuses_before_it_writes,
    test_gather_takes_gradients_that_have_a_graph_and_leaves_it_alone,
    test_gradients_that_are_not_in_place,
)
from ..test_guard import (
    test_conjugates_and_negatives_are_seen,
    test_memory_that_a_buffer_leaves_stays_with_its_parameters,
    test_tensors_with_gaps_and_without_memory_are_guarded_too,
    test_views_may_share_memory_but_a_parameter_may_not_become_a_result,
    test_who_requires_grad_and_of_what_class_does_not_matter,
)

__all__ = [
    "test_autograd_is_told_by_who_writes_and_not_by_who_looks",
    "test_conjugates_and_negatives_are_seen",
    "test_gather_brings_every_gradient_to_its_place",
    "test_gather_from_gradients_that_lie_in_the_buffers",
    "test_gather_refuses_before_it_writes",
    "test_gather_takes_gradients_that_have_a_graph_and_leaves_it_alone",
    "test_gradients_that_are_not_in_place",
    "test_memory_that_a_buffer_leaves_stays_with_its_parameters",
    "test_tensors_with_gaps_and_without_memory_are_guarded_too",
    "test_the_first_that_left_is_named",
    "test_views_may_share_memory_but_a_parameter_may_not_become_a_result",
    "test_who_requires_grad_and_of_what_class_does_not_matter",
]

pytestmark = pytest.mark.usefixtures("with_loops")
