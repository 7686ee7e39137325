"""``functional-optim plan``: its tables, pictures and files, and the errors that it reports."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import functional_optim as fo
from functional_optim import adamw
from sharding import MatrixBlocks, ParameterSpec, ShardPlan, plan
from sharding.pieces import whole_pieces
from sharding.text import format_bytes
from tests.choices import case

from .commands import refused, run, safetensors, shapes, shown
from .support import of_sizes


def test_a_list_of_shapes(tmp_path: Path) -> None:
    path = shapes(tmp_path, [[100, 10], [10], {"path": "w", "shape": [5], "dtype": "bfloat16"}])
    text = shown("--model", path, "--world-size", 4, "--policy", "elements")
    assert "elements: 3 parameters, 1,015 elements, 4 ranks" in text
    assert [line.split()[0] for line in text.splitlines()[3:7]] == ["0", "1", "2", "3"]


def test_the_header_of_a_safetensors_file(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "BF16", "shape": [8], "data_offsets": [0, 16]},
        "a": {"dtype": "F32", "shape": [4, 2], "data_offsets": [16, 48]},
        "steps": {"dtype": "I64", "shape": [], "data_offsets": [48, 56]},
    }
    model, saved = safetensors(tmp_path, header), tmp_path / "plan.json"
    text = shown("--model", model, "--world-size", 2, "--save", saved, "--optimizer", "none")
    assert "1 tensors, the first is steps" in text
    made = ShardPlan.from_json(saved.read_text())
    assert made.digest in text
    assert [(spec.path, spec.shape, str(spec.dtype)) for spec in made.specs] == [
        ("a", (4, 2), "torch.float32"),
        ("b", (8,), "torch.bfloat16"),
    ]


def test_a_model_is_made_on_the_meta_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planned_model.py").write_text(
        "import torch\n"
        "def huge():\n"
        "    return torch.nn.Linear(2**20, 2**20)  # 4 TiB\n"
        "def number():\n"
        "    return 3\n"
        "def broken():\n"
        "    raise RuntimeError('no weights')\n"
    )
    monkeypatch.chdir(tmp_path)
    text = shown("--model", "planned_model:huge", "--world-size", 2, "--optimizer", "sgd")
    assert "4.00 TiB" in text
    for name, message in (
        ("number", "must return a torch.nn.Module, got int"),
        ("broken", "no weights"),
        ("nothing", "'planned_model' has no 'nothing'"),
        ("__name__", "must be callable"),
    ):
        refused(message, "--model", f"planned_model:{name}", "--world-size", 2)
    del sys.modules["planned_model"]


def test_nodes(tmp_path: Path) -> None:
    arguments = ["--model", shapes(tmp_path, [[64]]), "--world-size", 8, "--policy", "hierarchical"]
    text = shown(*arguments, "--node-size", 4, "--within", "elements", "--align", 2, "--rows", 2)
    assert "8 ranks (2 replicas of 4; shown is one)" in text
    assert "between replicas a rank sends up to 64 B in a step" in text
    assert "(2 more ranks, none of them fuller)" in text


def test_makespan_and_memory_are_shown_with_their_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command shows makespan and memory beside their bounds.

    The model has a matrix with blocks, and the optimizer is the user's.
    """
    (tmp_path / "planned_rule.py").write_text(
        "import functional_optim as fo\n"
        "def split():\n"
        "    labels = fo.labels({'matrices': fo.with_shape(ndim=2)}, default='rest')\n"
        "    return fo.partition({'matrices': fo.muon(), 'rest': fo.adamw()}, labels)\n"
    )
    monkeypatch.chdir(tmp_path)
    blocks = {"path": "qkv", "shape": [12, 4], "kind": "per_matrix", "blocks": {"row_blocks": 3}}
    path = shapes(tmp_path, [blocks, [8, 4], [100]])
    arguments = ["--model", path, "--world-size", 3, "--policy", "two_resource"]
    arguments += ["--optimizer", "planned_rule:split"]
    text = shown(*arguments)
    assert "FLOP/step" in text
    lines = text.splitlines()
    assert lines[-3].startswith("makespan ") and "of the lower bound" in lines[-3]
    assert lines[-2].startswith("memory ") and "of the mean" in lines[-2]
    found = json.loads(shown(*arguments, "--json"))
    split = fo.partition(
        {"matrices": fo.muon(), "rest": adamw()},
        fo.labels({"matrices": fo.with_shape(ndim=2)}, default="rest"),
    )
    specs = [
        ParameterSpec("qkv", (12, 4), kind="per_matrix", blocks=MatrixBlocks(row_blocks=3)),
        ParameterSpec("parameter_1", (8, 4), kind="per_matrix"),
        ParameterSpec("parameter_2", (100,)),
    ]
    numbers = plan(specs, 3, "two_resource", split).report(split)
    assert found["makespan"] == {
        "flops": numbers.makespan,
        "over_mean": numbers.imbalance("flops"),
        "over_bound": numbers.makespan_over_bound,
    }
    assert found["memory"]["bytes"] == max(numbers.total_bytes)
    assert [one["flops"] for one in found["ranks_of_one_replica"]] == list(numbers.flops)
    for wrong, message in (
        ({"rows": 3}, "blocks must be an object with some of batch_axes, column_axes"),
        ({"row_blocks": 5}, "row_blocks=5 must divide the 12 rows"),
        ({"row_blocks": "3"}, "must be whole numbers, got '3'"),
    ):
        refused(
            message, "--model", shapes(tmp_path, [{**blocks, "blocks": wrong}]), "--world-size", 2
        )
    del sys.modules["planned_rule"]


def test_pictures_are_written(tmp_path: Path) -> None:
    picture, vector = tmp_path / "plan.png", tmp_path / "plan.svg"
    shown("--model", shapes(tmp_path, [[64]]), "--world-size", 3, "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    plan(of_sizes(9, 4), 4, "hierarchical", node_size=2).plot(vector, adamw())
    assert "rank within a replica" in vector.read_text()


def test_bad_options_are_refused(tmp_path: Path) -> None:
    model = shapes(tmp_path, [[4]])
    for arguments, message in (
        ("0", "0 is not in the range 1<=x<=262144"),
        ("2 --policy best", "'best' is not one of 'greedy', 'largest_first'"),
        ("2 --align 4", "--align is an option of the policy 'elements'"),
        ("2 --within greedy", "of the policy 'hierarchical', not of"),
        ("2 --policy hierarchical", "needs --node-size"),
        ("3 --policy hierarchical --node-size 2", "divide the number of ranks, 3, got 2"),
        ("2 --plot a.txt", "must end in .pdf, .png, .svg, got 'a.txt'"),
        ("2 --policy balanced", "'balanced' was removed; its replacement is 'largest_first'"),
        ("2 --optimizer magic", "must be package.module:name or one of"),
    ):
        refused(message, "--model", model, "--world-size", *arguments.split())


def test_bad_shapes_are_refused(tmp_path: Path) -> None:
    content: Any
    for content, message in (
        ({"w": [3]}, "must hold a list of shapes, got dict"),
        ([3], "a shape must be a list of whole numbers, got 3"),
        ([[2.5]], "a shape must be a list of whole numbers, got [2.5]"),
        ([[-2]], "must be sizes >= 0"),
        ([{"size": [3]}], "entry 0 must be a shape, or an object with a shape"),
        ([{"shape": [3], "dtype": "x"}], "dtype must be the name of one of torch's"),
        ([{"path": "w", "shape": [3]}] * 2, "have the path 'w'"),
    ):
        refused(message, "--model", shapes(tmp_path, content), "--world-size", 2)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    header: Any
    for header, length, message in (
        ({}, 10**12, "is no safetensors file: its header would have 1000000000000 bytes"),
        ([], None, "its header is no object"),
        ({"a": 3}, None, "no dtype and shape of 'a'"),
        ({"a": {"dtype": "F1", "shape": []}}, None, "'a' has the unknown dtype 'F1'"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 9, "does not hold JSON where it must"),
    ):
        model = safetensors(tmp_path, header, length=length)
        refused(message, "--model", model, "--world-size", 2)


def test_models_that_are_nowhere_are_refused() -> None:
    for source, message in (
        ("nowhere.json", "No such file"),
        ("model", "must be given as package.module:callable"),
        (":name", "must have the form package.module:name"),
        ("no_such_module:name", "No module named 'no_such_module'"),
    ):
        refused(message, "--model", source, "--world-size", 2)


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    saved = tmp_path / "no" / "folder.json"
    result = run("--model", shapes(tmp_path, [[4]]), "--world-size", 2, "--save", saved)
    assert result.exit_code == 1
    assert "folder.json cannot be written" in " ".join(result.output.split())


def test_the_fullest_rank_is_always_shown() -> None:
    fullest = 33
    made = ShardPlan(40, tuple(of_sizes(5, 9)), whole_pieces([5, 9], [1, fullest]))
    for rows in (1, 2, 5):
        with case(rows=rows):
            lines = made.table(rows=rows).splitlines()
            ranks = [int(line.split()[0]) for line in lines[3 : 3 + rows]]
            assert fullest in ranks
            assert f"({40 - rows} more ranks" in made.table(rows=rows)
    with pytest.raises(ValueError, match="rows must be a whole number >= 1"):
        made.table(rows=0)


def test_sizes_are_readable() -> None:
    counts = (0, 999, 1000, 1024, 5 * 2**40)
    assert [*map(format_bytes, counts)] == ["0 B", "999 B", "0.98 KiB", "1.00 KiB", "5.00 TiB"]
