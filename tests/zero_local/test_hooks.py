"""Tests on threads that ZeRO hooks under DDP give the results of one process."""

import json

import pytest
from hypothesis import given, note

from tests.choices import examples
from tests.zero_drawn.cases import POLICIES, Case
from tests.zero_drawn.checks import check
from tests.zero_drawn.drawing import AS_DRAWN, cases
from tests.zero_drawn.runs import run_locally


@pytest.mark.parametrize("policy", POLICIES)
def test_any_hook_on_any_rank_is_one_process(policy: str) -> None:
    """Drawn cases match one process in parameters, state, losses and gradients.

    Each element is stepped once (see tests/zero_drawn).
    """

    @examples(1, **AS_DRAWN)
    @given(case=cases(policy, ("reference", "blocked")))
    def every_case(case: Case) -> None:
        note(json.dumps(case._asdict()))
        check(case, run_locally(case))

    every_case()
