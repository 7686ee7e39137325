"""torch's ZeroRedundancyOptimizer over our optimizers, on two gloo processes."""

from typing import Any

import pytest

from tests.ranks import Job, run_ranks

from . import fused_worker, local_worker, zero_worker


@pytest.mark.parametrize("worker", [zero_worker, local_worker], ids=["zero", "local"])
def test_torch_zero_is_one_process_bit_for_bit(worker: Any) -> None:
    # One worker overlaps steps with DDP, by torch's map. The other steps a local optimizer.
    outcomes = run_ranks({"zero": Job(worker.job)}, ranks=2, seconds=300, fresh=True)["zero"]
    assert [outcome.result() for outcome in outcomes] == ["bitwise", "bitwise"]


def test_ddp_steps_in_its_hook_as_after_backward() -> None:
    """An optimizer that torch fuses with a DDP module steps in the hook as after backward."""
    outcomes = run_ranks({"fused": Job(fused_worker.job)}, ranks=2, seconds=300, fresh=True)
    assert [outcome.result() for outcome in outcomes["fused"]] == ["parity", "parity"]
