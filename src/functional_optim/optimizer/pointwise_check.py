"""Check of a chain at its registration: are its pointwise stages pointwise?"""

import torch

from functional_optim.core.hyper import resolve, to_floats
from functional_optim.core.leaf import Leaf, needs_total
from functional_optim.core.stage import Link
from functional_optim.core.stage_contract import call_coefficients, init_state
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.pointwise_check import check_pointwise_stages
from functional_optim.optimizer import Optimizer

_CHECKED: Cache[None] = Cache()
"""Stages that are pointwise, and which of their numbers are not zero."""


def require_pointwise(optimizer: Optimizer) -> None:
    """Check that the stages of a pointwise chain compute with one element at a time.

    Each stage is checked once, since its numbers may change in each step. It is checked again if
    other numbers are zero. An optimizer with a stage that is not pointwise, or that needs a total
    or inputs, is not checked.
    """
    if any(one.kind != "pointwise" or needs_total(one) for one in optimizer.stages):
        return
    if any(one.dtypes or one.granularity > 1 for one in optimizer.stages):
        return
    for link in optimizer.links:
        numbers = (bool(one) if isinstance(one, (bool, int, float)) else None for one in link.hyper)
        _CHECKED.get_or_make((link.stage, *numbers), lambda link=link: _check(link))  # type: ignore[misc]  # called at once


def _check(link: Link) -> None:
    stage = link.stage
    if stage.extra or stage.inputs:
        return
    hyper = resolve(stage.name, stage.bounds, stage.check, link.hyper, 1.0)
    shared = [] if stage.combine is None else [stage.combine(stage.init_shared(hyper), (), hyper)]
    coefficients = to_floats(call_coefficients(stage, 1.0, hyper, *shared))
    param = torch.zeros(1, dtype=torch.float64)
    state = init_state(stage, param, hyper)
    leaf = Leaf(param, param, (state,), (coefficients,), "p", (hyper,), 1.0)
    check_pointwise_stages([stage], leaf, [])
