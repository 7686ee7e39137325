"""torch's ZeroRedundancyOptimizer over classes of ours, on two gloo processes."""

from pathlib import Path

import pytest

from .processes import run_ranks


@pytest.mark.parametrize("script", ["zero_worker.py", "local_worker.py"])
def test_torch_zero_is_one_process_bit_for_bit(script: str, tmp_path: Path) -> None:
    # Overlapped with DDP, by torch's map; and without, ours as its local optimizer.
    outputs = run_ranks(script, 2, tmp_path / "meeting")
    assert [output.split() for output in outputs] == [["bitwise"], ["bitwise"]]


def test_ddp_steps_in_its_hook_as_after_backward(tmp_path: Path) -> None:
    """What torch registers as the fused optimizer of a DDP module steps there."""
    outputs = run_ranks("fused_worker.py", 2, tmp_path / "meeting")
    assert [output.split() for output in outputs] == [["parity"], ["parity"]]
