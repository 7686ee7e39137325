"""torch's own tests of its DistributedOptimizer, which pass on our class."""

import re
from importlib.util import find_spec
from pathlib import Path

from tests.ranks import Job, run_ranks

from . import torchs_own

TESTS = [
    "test_dist_optim",
    "test_dist_optim_exception",
    "test_dist_optim_exception_on_constructor",
    "test_dist_optim_none_grads",
]


def test_these_are_all_of_them() -> None:
    found = find_spec("torch")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent / "testing/_internal/distributed/rpc"
    text = (folder / "dist_optimizer_test.py").read_text("utf-8")
    assert re.findall(r"def (test_\w+)\(self\)", text.partition("class DistOptimizerTest")[2]) == [
        "test_dist_optim_exception",
        "test_dist_optim_exception_on_constructor",
        "test_dist_optim",
        "test_dist_optim_none_grads",
    ]
    assert len(TESTS) == 4


def test_torchs_own_pass_on_ours(tmp_path: Path) -> None:
    job = Job(torchs_own.run, {"names": TESTS, "meeting": str(tmp_path / "meeting")})
    outcomes = run_ranks({"own": job}, ranks=4, seconds=120, fresh=True)["own"]
    assert [outcome.result() for outcome in outcomes] == [dict.fromkeys(TESTS, "passed")] * 4
