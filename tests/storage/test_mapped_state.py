"""State in memory-mapped files."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from functional_optim import Optimizer, State, adamw, chain, clip_by_global_norm, sgd
from functional_optim.core.state import state_tensors
from functional_optim.storage import mapped_state, state_files, stored

from ..choices import case
from ..tensors import assert_same, normal
from .support import CHOICES, made

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


def require_there_again(optimizer: Optimizer, dtype: torch.dtype, folder: Path) -> None:
    params, mapped = tree(0, dtype), tree(0, dtype)
    state, files = optimizer.init(params), mapped_state(optimizer, mapped, folder)
    assert_same(files, state)
    for seed in (1, 2):
        step(optimizer, params, state, seed)
        step(optimizer, mapped, files, seed)
    assert_same((mapped, files), (params, state))
    again = mapped_state(optimizer, mapped, folder)
    assert_same(again, state)
    step(optimizer, params, state, 3)
    step(optimizer, mapped, again, 3)
    assert_same((mapped, again), (params, state))
    assert_same(files, again)  # both use the same memory
    strides = [
        [tensor.stride() for tensor in state_tensors(one.leaves["t"].stages)]
        for one in (again, state)
    ]
    assert strides[0] == strides[1]


def test_it_steps_as_in_memory_and_is_there_again(tmp_path: Path) -> None:
    for number, name in enumerate(CHOICES):
        with case(name=name):
            require_there_again(*made(name), tmp_path / str(number))


def test_what_starts_from_another_value_is_written(tmp_path: Path) -> None:
    params = {"w": normal(5)}
    optimizer = sgd(momentum=0.9)  # its buffer starts from minus zero
    assert_same(mapped_state(optimizer, params, tmp_path), optimizer.init(params))
    master = stored(optimizer, param="bfloat16+master")
    params = {"w": normal(5).bfloat16()}
    assert_same(mapped_state(master, params, tmp_path / "more"), master.init(params))


W, B = torch.ones(3), torch.ones(2)
ELSE: list[tuple[Optimizer, dict[str, torch.Tensor], str]] = [
    (adamw(), {"w": torch.ones(4), "b": B}, r"at 'w' it has .*\(3,\)"),
    (adamw(), {"w": W}, "at 'b' it has .*wanted is nothing"),
    (adamw(), {"w": W, "b": B, "c": torch.ones(1)}, "at 'c' it has nothing, wanted is"),
    (sgd(momentum=0.9), {"w": W, "b": B}, "momentum_buffer"),
    (stored(adamw(), state="int8"), {"w": W, "b": B}, "uint8"),
    (adamw(), {"w": W.double(), "b": B.double()}, r"wanted is .*float64"),
]


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    mapped_state(adamw(), {"w": W, "b": B}, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for optimizer, params, match in ELSE:
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
    with pytest.raises(ValueError, match="matches no parameter"):
        mapped_state(adamw().override(("b",), lr=0.1), {"a": torch.ones(3)}, folder)
    with pytest.raises(ValueError, match="is on meta, and adam keeps its state there"):
        mapped_state(adamw(), torch.ones(3, device="meta"), folder)
    assert not folder.exists()


def test_stateless_chains_have_a_step_count(tmp_path: Path) -> None:
    optimizer, params = chain(clip_by_global_norm(1.0), sgd()), {"w": torch.ones(2)}
    state = mapped_state(optimizer, params, tmp_path)
    optimizer.update_(params, {"w": torch.ones(2)}, state)
    assert int(mapped_state(optimizer, params, tmp_path).leaves["w"].step) == 1


def test_there_is_room_for_all_of_it_from_the_beginning(tmp_path: Path) -> None:
    """New files have no holes, and holes are filled when files are opened again."""
    param = torch.ones(1 << 15)
    for _ in range(2):
        state = mapped_state(adamw(), param, tmp_path)
        assert not state.leaves.stages[-1].exp_avg.any()
        for file in tmp_path.glob("*.bin"):
            found = file.stat()
            assert found.st_blocks * 512 >= found.st_size
            with file.open("r+b") as opened:
                opened.truncate(0)
                opened.truncate(found.st_size)


def fails(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a full disk at the given moment."""
    calls = []

    def full(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 2 or when != "reserving":
            raise OSError(28, "No space left on device")

    if when == "init":
        init_leaf = state_files.init_leaf
        monkeypatch.setattr(
            state_files,
            "init_leaf",
            lambda *a: init_leaf(*a) if a[2].device.type == "meta" else full(),
        )
    elif when == "reserving":
        monkeypatch.setattr(state_files.os, "posix_fallocate", full)
    else:
        monkeypatch.setattr(Path, "replace", full)


def test_what_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    for when, there in itertools.product(("reserving", "init", "manifest"), (False, True)):
        folder = tmp_path / f"{when} {there}"
        if there:
            folder.mkdir()
        with case(when=when, there=there), pytest.MonkeyPatch.context() as monkeypatch:
            fails(when, monkeypatch)
            with pytest.raises(OSError, match="No space left on device"):
                mapped_state(adamw(), torch.ones(3), folder)
            assert folder.exists() == there
            assert not there or not list(folder.iterdir())
        mapped_state(adamw(), torch.ones(3), folder)


def test_where_room_cannot_be_reserved_zeros_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some systems, such as macOS, cannot reserve room."""
    monkeypatch.delattr(state_files.os, "posix_fallocate")
    param = torch.ones(1 << 15)
    state = mapped_state(adamw(), param, tmp_path)
    assert all(one.stat().st_blocks * 512 >= one.stat().st_size for one in tmp_path.glob("*.bin"))
    adamw().update_(param, param, state)
    assert_same(mapped_state(adamw(), param, tmp_path), state)


def test_two_leaves_with_one_path_are_refused(tmp_path: Path) -> None:
    """They would have been the same memory."""
    params = {"a.b": torch.ones(2), "a": {"b": torch.ones(2)}}
    with pytest.raises(ValueError, match=r"2 leaves of params have the path 'a\.b'"):
        mapped_state(adamw(0.1), params, tmp_path / "state")
    assert not (tmp_path / "state").exists()
