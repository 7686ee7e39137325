"""A class that torch does not know, registered in torch, under torch's own front-ends."""

from pathlib import Path

from .processes import run_ranks


def test_torch_steps_qhm_over_rpc_bit_for_bit(tmp_path: Path) -> None:
    outputs = run_ranks("rpc_worker.py", 2, tmp_path / "meeting")
    assert outputs[0].split() == ["bitwise"]
