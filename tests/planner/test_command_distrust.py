"""``functional-optim plan`` on files from others: no code runs, and no input makes it hang."""

import json
import sys
from pathlib import Path

import pytest

from sharding import ParameterSpec, ShardPlan, plan
from sharding.problem import MOST_RANKS
from tests.choices import case

from .commands import refused, run, safetensors, shapes, shown
from .support import of_sizes

ESCAPES = "\x1b]0;title\x07\x1b[31mred\x9b1m\u202eover\r\nrank 0: all"


def test_a_model_is_found_in_the_current_folder_and_nothing_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_model_of_mine.py").write_text(
        "import torch\n"
        "def made():\n"
        "    import beside_it\n"
        "    return torch.nn.Linear(2, beside_it.SIZE)\n"
    )
    (tmp_path / "beside_it.py").write_text("SIZE = 3\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert "9 elements" in shown("--model", "a_model_of_mine:made", "--world-size", 2)
    assert sys.path == before
    refused("no_such_model", "--model", "no_such_model:made", "--world-size", 2)
    assert sys.path == before
    for name in ("a_model_of_mine", "beside_it"):
        sys.modules.pop(name)


def test_there_are_only_so_many_ranks(tmp_path: Path) -> None:
    model = shapes(tmp_path, [[4]])
    shown("--model", model, "--world-size", MOST_RANKS)
    for world_size in (MOST_RANKS + 1, 10**18):
        message = f"{world_size} is not in the range 1<=x<={MOST_RANKS}"
        refused(message, "--model", model, "--world-size", world_size)
        with pytest.raises(ValueError, match=f"world_size must be at most {MOST_RANKS}"):
            plan(of_sizes(4), world_size)
        text = plan(of_sizes(4), 2).to_json()
        text = text.replace('"world_size":2', f'"world_size":{world_size}')
        with pytest.raises(ValueError, match=f"world_size must be at most {MOST_RANKS}"):
            ShardPlan.from_json(text)


def test_brackets_in_brackets(tmp_path: Path) -> None:
    for opening in ("[", '{"a":', '[{"path": "w", "shape": '):
        text = opening * 200_000
        data = text.encode()
        for name, header in (
            ("shapes.json", b""),
            ("model.safetensors", len(data).to_bytes(8, "little")),
        ):
            (tmp_path / name).write_bytes(header + data)
            said = refused("nested too deeply", "--model", tmp_path / name, "--world-size", 2)
            assert len(said) < 1000
        with case(opening=opening), pytest.raises(ValueError, match="nested too deeply"):
            ShardPlan.from_json(text)


def test_more_elements_than_a_tensor_can_have(tmp_path: Path) -> None:
    for shape in ([10**30], [10**400], [2**40, 2**40], [2**63]):
        model = shapes(tmp_path, [shape])
        refused("more elements than a tensor can have", "--model", model, "--world-size", 2)
    assert ParameterSpec("w", (2**63 - 1,)).numel == 2**63 - 1
    assert ParameterSpec("w", (0, 2**62)).numel == 0


def printable(text: str) -> bool:
    return all(letter.isprintable() or letter == "\n" for letter in text)


def test_names_reach_the_terminal_without_their_escape_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"dtype": "F32", "shape": [2]}
    for header in (
        {"w": entry, ESCAPES: {"dtype": "I64", "shape": []}},
        {ESCAPES: entry},
        {ESCAPES: 3},
        {ESCAPES: {"dtype": "F32", "shape": [-1]}},
        {ESCAPES: {"dtype": ESCAPES, "shape": [1]}},
    ):
        result = run("--model", safetensors(tmp_path, header), "--world-size", 2)
        with case(header=header):
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
    header = {"w": {"dtype": "F32", "shape": [2]}, "x" * 10**6: {"dtype": "I64", "shape": []}}
    assert len(shown("--model", safetensors(tmp_path, header), "--world-size", 2)) < 3000
    long = shapes(tmp_path, [["x" * 10**6]])
    assert len(refused("", "--model", long, "--world-size", 2)) < 3000


def test_differences_of_plans_are_printable() -> None:
    one, two = (plan([ParameterSpec(name, (4,))], 2) for name in (ESCAPES, "w"))
    text = str(one.diff(two))
    assert printable(text) and text.count("\n") == 1
    assert json.loads(one.to_json())["parameters"]["path"] == [ESCAPES]
