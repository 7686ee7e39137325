"""Class that torch does not know, registered in torch and stepped by DistributedOptimizer."""

from pathlib import Path

from tests.ranks import Job, run_ranks

from . import rpc_worker


def test_torch_steps_qhm_over_rpc_bit_for_bit(tmp_path: Path) -> None:
    job = Job(rpc_worker.job, {"meeting": str(tmp_path / "meeting")})
    driver, server = run_ranks({"qhm": job}, ranks=2, seconds=300, fresh=True)["qhm"]
    assert (driver.result(), server.result()) == ("bitwise", None)
