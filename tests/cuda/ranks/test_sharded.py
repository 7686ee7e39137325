"""Tests over NCCL of matrices of FSDP2 that owners step, and of checkpoints of ZeRO."""

from pathlib import Path

import pytest
import torch

from . import sharded
from .outcomes import outcomes_of

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.mark.parametrize("ranks", [2, 4])
def test_muon_under_fsdp2(ranks: int) -> None:
    for _, seen in outcomes_of(sharded.matrices, [{"steps": 4}], ranks):
        assert len(seen) == ranks
        assert all(rank["apart"] < 1e-3 for rank in seen), seen


def test_checkpoints(tmp_path: Path) -> None:
    """A checkpoint of two ranks continues with another plan, bit for bit."""
    cases = [{"folder": str(tmp_path / "saved"), "steps": 3}]
    for _, seen in outcomes_of(sharded.checkpoint, cases, 2):
        assert [rank["equal"] for rank in seen] == [True, True]
