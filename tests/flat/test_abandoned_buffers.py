"""Parameters in the buffers of an optimizer that was deleted."""

import gc
import weakref

import torch

from functional_optim import sgd
from functional_optim.core.buffer_memory import buffer_of
from functional_optim.plan.flat.move_checks import immovable_reason


def test_whether_garbage_was_collected_makes_no_difference() -> None:
    """The reason not to move a parameter does not depend on garbage collection.

    Ranks must lay out parameters alike, and each rank collects its garbage at another time.
    """
    reasons = []
    for collects in (False, True):
        params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        bound = [sgd(0.1).bind(params)]
        bound.append(bound)  # type: ignore[arg-type]  # only the collector frees it
        del bound
        if collects:
            gc.collect()
        reasons.append([immovable_reason(one) for one in params])
    assert reasons[0] == reasons[1]
    assert all(one is not None and "flat buffer" in one for one in reasons[0])


def test_the_record_of_a_buffer_goes_with_the_last_parameter_in_it() -> None:
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    sgd(0.1).bind(params)
    gc.collect()
    whole = buffer_of(params[0])
    assert whole is not None
    record = weakref.ref(whole)
    del whole, params
    gc.collect()
    assert record() is None
