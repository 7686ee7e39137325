"""``functional-optim plan`` on what others wrote: nothing runs, nothing hangs (fault 18)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sharding import ParameterSpec, ShardPlan, plan
from sharding.problem import MOST_RANKS

from .support import of_sizes
from .test_command import run, safetensors, shapes

ESCAPES = "\x1b]0;title\x07\x1b[31mred\x9b1m\u202eover\r\nrank 0: all"


def says(result: Any) -> str:
    """What it says, in one line."""
    return " ".join(result.output.split())


def test_files_bring_no_modules_of_the_current_folder(tmp_path: Path) -> None:
    """(fault 18)"""
    shapes(tmp_path, [[4]])
    safetensors(tmp_path, {"w": {"dtype": "F32", "shape": [4]}})
    for name in ("matplotlib", "rich", "planted"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()\n")
    for source in ("shapes.json", "model.safetensors"):
        arguments = ["--model", source, "--world-size", "2", "--plot", "plan.png"]
        command = [sys.executable, "-P", "-m", "functional_optim", "plan", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=100, stdout=subprocess.DEVNULL)
        assert not (tmp_path / "ran").exists()
        assert (tmp_path / "plan.png").exists()


def test_a_model_is_found_in_the_current_folder_and_nothing_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(fault 18)"""
    (tmp_path / "a_model_of_mine.py").write_text(
        "import torch\n"
        "def made():\n"
        "    import beside_it\n"
        "    return torch.nn.Linear(2, beside_it.SIZE)\n"
    )
    (tmp_path / "beside_it.py").write_text("SIZE = 3\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    result = run("--model", "a_model_of_mine:made", "--world-size", 2)
    assert result.exit_code == 0, result.output
    assert "9 elements" in result.output
    assert sys.path == before
    assert run("--model", "no_such_model:made", "--world-size", 2).exit_code == 2
    assert sys.path == before
    for name in ("a_model_of_mine", "beside_it"):
        sys.modules.pop(name)


@pytest.mark.parametrize("world_size", [MOST_RANKS + 1, 10**9, 10**18])
def test_more_ranks_than_there_are(world_size: int, tmp_path: Path) -> None:
    """(fault 18)"""
    result = run("--model", shapes(tmp_path, [[4]]), "--world-size", world_size)
    assert result.exit_code == 2
    assert f"{world_size} is not in the range 1<=x<={MOST_RANKS}" in says(result)
    with pytest.raises(ValueError, match=f"world_size must be at most {MOST_RANKS}"):
        plan(of_sizes(4), world_size)
    text = plan(of_sizes(4), 2).to_json().replace('"world_size":2', f'"world_size":{world_size}')
    with pytest.raises(ValueError, match=f"world_size must be at most {MOST_RANKS}"):
        ShardPlan.from_json(text)


def test_as_many_ranks_as_there_may_be(tmp_path: Path) -> None:
    result = run("--model", shapes(tmp_path, [[4]]), "--world-size", MOST_RANKS)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"path": "w", "shape": '])
def test_brackets_in_brackets(opening: str, tmp_path: Path) -> None:
    """(fault 18)"""
    text = opening * 200_000
    for name in ("shapes.json", "model.safetensors"):
        data = text.encode()
        header = len(data).to_bytes(8, "little") if name.endswith("s") else b""
        (tmp_path / name).write_bytes(header + data)
        result = run("--model", tmp_path / name, "--world-size", 2)
        assert result.exit_code == 2
        assert "nested too deeply" in says(result)
        assert len(result.output) < 1000
    with pytest.raises(ValueError, match="nested too deeply"):
        ShardPlan.from_json(text)


@pytest.mark.parametrize("shape", [[10**30], [10**400], [2**40, 2**40], [2**63]])
def test_more_elements_than_a_tensor_can_have(shape: list[int], tmp_path: Path) -> None:
    """(fault 18)"""
    result = run("--model", shapes(tmp_path, [shape]), "--world-size", 2)
    assert result.exit_code == 2
    assert "more elements than a tensor can have" in says(result)
    assert ParameterSpec("w", (2**63 - 1,)).numel == 2**63 - 1
    assert ParameterSpec("w", (0, 2**62)).numel == 0


def printable(text: str) -> bool:
    return all(letter.isprintable() or letter == "\n" for letter in text)


def test_names_reach_the_terminal_without_their_escape_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(fault 18)"""
    entry = {"dtype": "F32", "shape": [2]}
    for header in (
        {"w": entry, ESCAPES: {"dtype": "I64", "shape": []}},
        {ESCAPES: entry},
        {ESCAPES: 3},
        {ESCAPES: {"dtype": "F32", "shape": [-1]}},
        {ESCAPES: {"dtype": ESCAPES, "shape": [1]}},
    ):
        result = run("--model", safetensors(tmp_path, header), "--world-size", 2)
        assert printable(result.output)
        assert "\nrank 0: all" not in result.output
    for content in ([{"path": ESCAPES, "shape": [1], "dtype": ESCAPES}], [{ESCAPES: 1}]):
        assert printable(run("--model", shapes(tmp_path, content), "--world-size", 2).output)
    (tmp_path / "a_model_that_fails.py").write_text(
        f"def made():\n    raise ValueError({ESCAPES!r})\n"
    )
    monkeypatch.chdir(tmp_path)
    result = run("--model", "a_model_that_fails:made", "--world-size", 2)
    assert "title" in result.output and printable(result.output)
    assert printable(run("--model", f"nowhere{ESCAPES}.json", "--world-size", 2).output)
    sys.modules.pop("a_model_that_fails")


def test_a_name_without_end_is_cut(tmp_path: Path) -> None:
    """(fault 18)"""
    header = {"w": {"dtype": "F32", "shape": [2]}, "x" * 10**6: {"dtype": "I64", "shape": []}}
    result = run("--model", safetensors(tmp_path, header), "--world-size", 2)
    assert result.exit_code == 0 and len(result.output) < 3000
    result = run("--model", shapes(tmp_path, [["x" * 10**6]]), "--world-size", 2)
    assert result.exit_code == 2 and len(result.output) < 3000


def test_differences_of_plans_are_printable() -> None:
    """(fault 18)"""
    one, two = (plan([ParameterSpec(name, (4,))], 2) for name in (ESCAPES, "w"))
    text = str(one.diff(two))
    assert printable(text) and text.count("\n") == 1
    assert json.loads(one.to_json())["parameters"]["path"] == [ESCAPES]
