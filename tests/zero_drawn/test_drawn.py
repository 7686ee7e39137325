"""Test on processes that each rank of a drawn case matches one process bit for bit.

tests/zero_local/test_hooks.py tests the same law on threads, with two executors.
"""

import json

import pytest
from hypothesis import given, note

from tests.choices import examples
from tests.ranks import Job, run_ranks

from .cases import POLICIES, Case
from .checks import check
from .drawing import AS_DRAWN, cases
from .runs import run_case


@pytest.mark.timeout(900)
def test_any_hook_on_any_rank_is_one_process() -> None:
    for policy in POLICIES:

        @examples(1, **AS_DRAWN)
        @given(case=cases(policy))
        def every_case(case: Case) -> None:
            note(json.dumps(case._asdict()))
            job = Job(run_case, {"case": case._asdict()}, group_seconds=20)
            outcomes = run_ranks({"case": job}, ranks=case.world, seconds=90)["case"]
            check(case, [outcome.result() for outcome in outcomes])

        every_case()
