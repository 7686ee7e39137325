"""State that another process continues with, and a full disk."""

import pickle
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from functional_optim import adamw
from functional_optim.storage import mapped_state, stored

from ...tensors import assert_same, normal
from ..support import steps

READER = """
import pathlib, pickle, sys, torch
folder = pathlib.Path(sys.argv[1])
optimizer = pickle.loads((folder / "optimizer.pkl").read_bytes())
saved = torch.load(folder / "saved.pt")
torch.save(optimizer.update(*saved), folder / "made.pt")

from functional_optim import adamw
from functional_optim.storage import mapped_state, stored
optimizer, params = stored(adamw(lr=0.1), state="int8"), torch.load(folder / "params.pt")
optimizer.update_(params, params, mapped_state(optimizer, params, folder / "state"))
torch.save(params, folder / "params.pt")
"""


def test_another_process_reads_optimizers_and_states_and_goes_on_in_mapped_files(
    tmp_path: Path,
) -> None:
    kahan = stored(adamw(lr=0.1), param="bfloat16+kahan", state="int8+stochastic")
    param, grad = normal(300).bfloat16(), normal(300, seed=1).bfloat16()
    param, state = steps(kahan, param, [grad])
    torch.save((param, grad, state), tmp_path / "saved.pt")
    (tmp_path / "optimizer.pkl").write_bytes(pickle.dumps(kahan))
    optimizer, params = stored(adamw(lr=0.1), state="int8"), {"w": normal(300), "b": normal(3)}
    # This process makes one step into files, and another process makes the next step.
    optimizer.update_(params, params, mapped_state(optimizer, params, tmp_path / "state"))
    torch.save(params, tmp_path / "params.pt")
    subprocess.run([sys.executable, "-c", READER, str(tmp_path)], check=True, timeout=900)
    assert_same(torch.load(tmp_path / "made.pt"), kahan.update(param, grad, state))
    params = {"w": normal(300), "b": normal(3)}
    wanted = optimizer.init(params)
    for _ in range(2):
        optimizer.update_(params, params, wanted)
    assert_same(torch.load(tmp_path / "params.pt"), params)
    assert_same(mapped_state(optimizer, params, tmp_path / "state"), wanted)


FULL = """
import sys, torch
from functional_optim import adamw
from functional_optim.storage import mapped_state
params = {"w": torch.ones(1 << 20)}
state = mapped_state(adamw(lr=0.1), params, sys.argv[1])
adamw(lr=0.1).update_(params, params, state)
"""


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """``mapped_state`` raises an error; otherwise a signal would kill the first step."""
    mount = f"mount -t tmpfs -o size=1m none {tmp_path} && "
    if subprocess.run(["unshare", "-rm", "sh", "-c", f"{mount} true"], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    script = shlex.join([sys.executable, "-c", FULL, str(tmp_path / "state")])
    made = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f"{mount} ({script}; echo $?; ls -A {tmp_path})"],
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    assert made.stdout.split() == ["1"]  # no file is left
    assert "8388616 bytes" in made.stderr and "No space left on device" in made.stderr
