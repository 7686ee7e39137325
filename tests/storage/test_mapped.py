"""State in memory-mapped files."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from functional_optim import Optimizer, State, adamw, chain, clip_by_global_norm, sgd
from functional_optim.storage import mapped, mapped_state, stored

from .support import BASES, CHOICES, assert_same, dtype_of, normal

SHAPES: dict[str, tuple[int, ...]] = {"a": (300,), "b": (4, 5), "c": (), "d": (0, 3)}


def tree(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: normal(*shape, seed=10 * seed + i).to(dtype)
        for i, (name, shape) in enumerate(SHAPES.items())
    }
    return {**found, "t": normal(6, 4, seed=seed).to(dtype).T, "none": None}


def step(optimizer: Optimizer, params: Any, state: State, seed: int) -> None:
    dtype = params["a"].dtype
    optimizer.update_(params, tree(seed, dtype), state)


@pytest.mark.parametrize("name", CHOICES)
def test_it_steps_as_in_memory_and_is_there_again(name: str, tmp_path: Path) -> None:
    base, arguments = CHOICES[name]
    optimizer, dtype = stored(BASES[base](), **arguments), dtype_of(arguments)
    params, mapped = tree(0, dtype), tree(0, dtype)
    state, files = optimizer.init(params), mapped_state(optimizer, mapped, tmp_path)
    assert_same(files, state)
    for seed in (1, 2):
        step(optimizer, params, state, seed)
        step(optimizer, mapped, files, seed)
    assert_same((mapped, files), (params, state))
    again = mapped_state(optimizer, mapped, tmp_path)
    assert_same(again, state)
    step(optimizer, params, state, 3)
    step(optimizer, mapped, again, 3)
    assert_same((mapped, again), (params, state))
    assert_same(files, again)  # the same memory
    for a, b in zip(again.leaves["t"].stages, state.leaves["t"].stages, strict=True):
        for one, two in zip(a, b, strict=True):
            if isinstance(one, torch.Tensor):
                assert one.stride() == two.stride()


def test_another_process_goes_on(tmp_path: Path) -> None:
    text = (
        "import sys, torch\n"
        "from functional_optim import adamw\n"
        "from functional_optim.storage import mapped_state, stored\n"
        "optimizer = stored(adamw(lr=0.1), state='int8')\n"
        "params = torch.load(sys.argv[2])\n"
        "state = mapped_state(optimizer, params, sys.argv[1])\n"
        "optimizer.update_(params, params, state)\n"
        "torch.save(params, sys.argv[2])\n"
    )
    optimizer = stored(adamw(lr=0.1), state="int8")
    params = {"w": normal(300), "b": normal(3)}
    saved, folder = tmp_path / "params.pt", tmp_path / "state"
    torch.save(params, saved)
    for _ in range(2):
        command = [sys.executable, "-c", text, str(folder), str(saved)]
        subprocess.run(command, check=True, timeout=120)
    state = optimizer.init(params)
    for _ in range(2):
        optimizer.update_(params, params, state)
    assert_same(torch.load(saved), params)
    assert_same(mapped_state(optimizer, params, folder), state)


def test_what_starts_from_another_value_is_written(tmp_path: Path) -> None:
    params = {"w": normal(5)}
    optimizer = sgd(momentum=0.9)  # its buffer starts from minus zero
    assert_same(mapped_state(optimizer, params, tmp_path), optimizer.init(params))
    master = stored(optimizer, param="bfloat16+master")
    params = {"w": normal(5).bfloat16()}
    assert_same(mapped_state(master, params, tmp_path / "more"), master.init(params))


@pytest.mark.parametrize(
    ("optimizer", "params", "match"),
    [
        (adamw(), {"w": torch.ones(4), "b": torch.ones(2)}, r"at 'w' it has .*\(3,\)"),
        (adamw(), {"w": torch.ones(3)}, "at 'b' it has .*wanted is nothing"),
        (
            adamw(),
            {"w": torch.ones(3), "b": torch.ones(2), "c": torch.ones(1)},
            "at 'c' it has nothing, wanted is",
        ),
        (sgd(momentum=0.9), {"w": torch.ones(3), "b": torch.ones(2)}, "momentum_buffer"),
        (stored(adamw(), state="int8"), {"w": torch.ones(3), "b": torch.ones(2)}, "uint8"),
        (
            adamw(),
            {"w": torch.ones(3).double(), "b": torch.ones(2).double()},
            r"wanted is .*float64",
        ),
    ],
)
def test_files_of_something_else_are_refused(
    optimizer: Optimizer, params: Any, match: str, tmp_path: Path
) -> None:
    mapped_state(adamw(), {"w": torch.ones(3), "b": torch.ones(2)}, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=match):
        mapped_state(optimizer, params, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_damaged_directories_are_refused(tmp_path: Path) -> None:
    param = torch.ones(3)
    mapped_state(adamw(), param, tmp_path)
    file = next(one for one in tmp_path.iterdir() if "exp_avg_sq" in one.name)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="has 11 bytes where 12 are expected"):
        mapped_state(adamw(), param, tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match="has no bytes where 12"):
        mapped_state(adamw(), param, tmp_path)
    file.write_bytes(whole)
    mapped_state(adamw(), param, tmp_path)
    manifest = tmp_path / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(json.dumps({**json.loads(text), "version": 2}))
    with pytest.raises(ValueError, match="not of version 1"):
        mapped_state(adamw(), param, tmp_path)
    manifest.write_text(text.replace('"int64",\n   1', '"int64",\n   2'))
    with pytest.raises(ValueError, match="has been changed"):
        mapped_state(adamw(), param, tmp_path)
    manifest.unlink()
    with pytest.raises(ValueError, match=r"holds '.*' but no manifest.json"):
        mapped_state(adamw(), param, tmp_path)


def test_what_init_refuses_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with pytest.raises(ValueError, match="takes parameters of torch.bfloat16"):
        mapped_state(stored(adamw(), param="bfloat16"), torch.ones(3), folder)
    with pytest.raises(ValueError, match="no tensor"):
        mapped_state(adamw(), {"a": None}, folder)
    with pytest.raises(ValueError, match="is meant for no parameter"):
        mapped_state(adamw().override(("b",), lr=0.1), {"a": torch.ones(3)}, folder)
    with pytest.raises(ValueError, match="is on meta, and adam keeps its state there"):
        mapped_state(adamw(), torch.ones(3, device="meta"), folder)
    assert not folder.exists()


def test_stateless_chains_have_a_step_count(tmp_path: Path) -> None:
    optimizer, params = chain(clip_by_global_norm(1.0), sgd()), {"w": torch.ones(2)}
    state = mapped_state(optimizer, params, tmp_path)
    optimizer.update_(params, {"w": torch.ones(2)}, state)
    assert int(mapped_state(optimizer, params, tmp_path).leaves["w"].step) == 1


FULL = """
import sys, torch
from functional_optim import adamw
from functional_optim.storage import mapped_state
params = {"w": torch.ones(1 << 20)}
state = mapped_state(adamw(lr=0.1), params, sys.argv[1])
adamw(lr=0.1).update_(params, params, state)
"""


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """It says so when it is made, and does not die of a signal at its first step (fault 14)."""
    mount = f"mount -t tmpfs -o size=1m none {tmp_path} && "
    if subprocess.run(["unshare", "-rm", "sh", "-c", f"{mount} true"], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    script = shlex.join([sys.executable, "-c", FULL, str(tmp_path / "state")])
    made = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f"{mount} ({script}; echo $?; ls -A {tmp_path})"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert made.stdout.split() == ["1"]  # and nothing is left there
    assert "8388616 bytes" in made.stderr and "No space left on device" in made.stderr


def test_there_is_room_for_all_of_it_from_the_beginning(tmp_path: Path) -> None:
    """Of files with holes too, when they are opened again (fault 14)."""
    param = torch.ones(1 << 20)
    for _ in range(2):
        state = mapped_state(adamw(), param, tmp_path)
        assert not state.leaves.stages[-1].exp_avg.any()
        for file in tmp_path.glob("*.bin"):
            found = file.stat()
            assert found.st_blocks * 512 >= found.st_size
            with file.open("r+b") as opened:
                opened.truncate(0)
                opened.truncate(found.st_size)


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("when", ["reserving", "init", "manifest"])
def test_what_cannot_be_made_leaves_nothing(
    when: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(fault 14)"""
    folder = tmp_path / "state"
    if there:
        folder.mkdir()
    calls = []

    def full(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 2 or when != "reserving":
            raise OSError(28, "No space left on device")

    where, name = {
        "reserving": (mapped.os, "posix_fallocate"),
        "init": (mapped, "init_leaf"),
        "manifest": (Path, "replace"),
    }[when]
    if when == "init":
        shadow = mapped.init_leaf
        monkeypatch.setattr(
            mapped, name, lambda *a: shadow(*a) if a[2].device.type == "meta" else full()
        )
    else:
        monkeypatch.setattr(where, name, full)
    with pytest.raises(OSError, match="No space left on device"):
        mapped_state(adamw(), torch.ones(3), folder)
    assert folder.exists() == there
    assert not there or not list(folder.iterdir())
    monkeypatch.undo()
    mapped_state(adamw(), torch.ones(3), folder)


def test_where_room_cannot_be_reserved_zeros_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS (fault 14)."""
    monkeypatch.delattr(mapped.os, "posix_fallocate")
    param = torch.ones(1 << 20)
    state = mapped_state(adamw(), param, tmp_path)
    assert all(one.stat().st_blocks * 512 >= one.stat().st_size for one in tmp_path.glob("*.bin"))
    adamw().update_(param, param, state)
    assert_same(mapped_state(adamw(), param, tmp_path), state)
