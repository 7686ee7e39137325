"""Tests of ``functional-optim inspect``: files, folders, and other input."""

import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from functional_optim import TorchOptimizer, adamw, stored
from tests import checkpoints
from tests.choices import case
from tests.zero_local import saved as sharded

from .support import failed, model, saved, shown, stepped

OLD = Path(__file__).parents[1] / "old_format" / "saved" / "adamw"
"""Folder that ZeroRedundancyOptimizer.save wrote."""


def test_a_file_of_torchs_own_class(tmp_path: Path) -> None:
    module = model()
    path = saved(tmp_path / "a.pt", stepped(torch.optim.AdamW(module.named_parameters()), module))
    content = json.loads(shown("inspect", path, "--json"))
    assert content["kind"] == "state dict"
    assert (content["parameters"], content["with_state"], content["steps"]) == (4, 4, [3, 3])
    assert content["names"] == [name for name, _ in module.named_parameters()]
    assert content["groups"][0]["options"]["lr"] == 0.001
    assert {"name": "exp_avg", "dtype": "float32", "tensors": 4, "elements": 23, "bytes": 92} in (
        content["fields"]
    )
    text = shown("inspect", path)
    assert "state dict: 4 parameters, 4 with state, step 3" in text


def test_a_file_of_ours_with_8_bit_state_inside_a_training_checkpoint(tmp_path: Path) -> None:
    module = model()
    ours = TorchOptimizer(module.parameters(), stored(adamw(), state="int8"))
    content = {"epoch": 3, "optimizers": [stepped(ours, module).state_dict()], "model": {}}
    torch.save(content, tmp_path / "all.pt")
    for key in ((), ("--key", "optimizers.0")):
        found = json.loads(shown("inspect", tmp_path / "all.pt", "--json", *key))
        assert found["names"] is None
        dtypes = {one["name"]: one["dtype"] for one in found["fields"]}
        assert dtypes == {"step": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"}


def test_a_folder_of_torch_distributed_checkpoint(tmp_path: Path) -> None:
    checkpoints.save(sharded.made(2), tmp_path / "zero")
    content = json.loads(shown("inspect", tmp_path / "zero", "--json", "--verify"))
    assert (content["kind"], content["files"]) == ("distributed checkpoint", 1)
    assert (content["parameters"], content["steps"], content["names"]) == (2, [2, 2], None)
    field = {"name": "exp_avg", "dtype": "float32", "tensors": 2, "elements": 7, "bytes": 28}
    assert field in content["fields"]
    text = shown("inspect", tmp_path / "zero", "--key", "optim")
    assert "distributed checkpoint, 1 files: 2 parameters, 2 with state, step 2" in text
    module, state = model(), {}
    plain = stepped(torch.optim.AdamW(module.parameters()), module)
    state["a"] = {"model": module.state_dict(), "optim": get_optimizer_state_dict(module, plain)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(state, checkpoint_id=tmp_path / "torch")
    content = json.loads(shown("inspect", tmp_path / "torch", "--json", "--key", "a.optim"))
    assert content["names"] == [name for name, _ in module.named_parameters()]
    assert "has no checksums; save with" in failed(1, "inspect", tmp_path / "torch", "--verify")


def test_a_folder_of_the_old_format() -> None:
    for verify in ((), ("--verify",)):
        content = json.loads(shown("inspect", OLD, "--json", *verify))
        assert content["kind"] == "folder of ZeroRedundancyOptimizer.save"
        assert (content["files"], content["parameters"], content["steps"]) == (3, 5, [2, 2])
        assert content["names"] == ["wide", "long", "number", "none", "late"]
        assert [group["options"]["lr"] for group in content["groups"]] == [0.1, 0.3]


def test_what_is_damaged_or_is_no_checkpoint_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("hello")
    torch.save([3], tmp_path / "list.pt")
    torch.save([torch.ones(5000)], tmp_path / "cut.pt")
    whole = (tmp_path / "cut.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[:-1])  # torch's reader then raises an OSError
    torch.save(model(), tmp_path / "module.pt")
    one = torch.optim.SGD(model().parameters()).state_dict()
    torch.save({"a": one, "b": one}, tmp_path / "two.pt")
    (tmp_path / "empty").mkdir()
    checkpoints.save(sharded.made(1), tmp_path / "damaged")
    (data,) = (tmp_path / "damaged").glob("*.distcp")
    data.write_bytes(bytes([data.read_bytes()[0] ^ 1]) + data.read_bytes()[1:])
    for name, arguments, message in (
        ("text.pt", (), "is not a file that torch.save wrote, or is damaged"),
        ("cut.pt", (), "cut.pt is not a file that torch.save wrote, or is damaged"),
        ("list.pt", (), "has 0 optimizers' state dicts"),
        ("module.pt", (), "cannot be read without running code: it has torch.nn.modules"),
        ("two.pt", (), "there is one at 'a', 'b'; name one with --key"),
        ("two.pt", ("--key", "c"), "has no optimizer's state dict at 'c'; there is one at 'a'"),
        ("empty", (), "has no .metadata, so no checkpoint was completed there"),
        ("damaged", ("--verify",), "it was damaged"),
    ):
        with case(name=name):
            assert message in failed(1, "inspect", tmp_path / name, *arguments)


def test_wrong_arguments_exit_with_2(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    for arguments, message in (
        (("nowhere.pt",), "'nowhere.pt' does not exist"),
        ((OLD, "--key", "a"), "--key has no effect"),
        ((path, "--verify"), "--verify is for folders"),
    ):
        with case(arguments=arguments):
            assert message in failed(2, "inspect", *arguments)


def test_what_a_terminal_would_obey_is_spelled_out(tmp_path: Path) -> None:
    entries = OrderedDict({"\x1b[31mred": torch.ones(2)})
    group = {"params": [0], "title": "\x1b]0;title\x07"}
    torch.save({"state": {0: entries}, "param_groups": [group]}, tmp_path / "a.pt")
    text = shown("inspect", tmp_path / "a.pt")
    assert "\x1b" not in text
    assert "\\x1b[31mred" in text
