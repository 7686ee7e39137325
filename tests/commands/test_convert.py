"""Tests of ``functional-optim convert``: the next step is the same as without the conversion."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import functional_optim as fo
from functional_optim.commands.objects import load_object
from sharding import ZeroRedundancyOptimizer
from sharding.storage import ChecksumReader
from sharding.storage.files import DurableFiles
from sharding.storage.folder import read_folder
from sharding.transport.local import LocalWorld
from tests import checkpoints
from tests.choices import case
from tests.zero_local.saved import same

from .support import failed, loaded, model, run, saved, shapes, shown, stepped

OLD = Path(__file__).parents[1] / "old_format" / "saved" / "adamw"
"""Folder that ZeroRedundancyOptimizer.save wrote."""
ADAMW = ("--optimizer", "torch.optim:AdamW")


FOLDER = ("--model", "own:model")


def content(folder: Path) -> Any:
    """Return the state dict of the optimizer in a folder."""
    return read_folder(folder)["optim"]


def test_a_file_of_torch_becomes_a_folder_for_any_number_of_ranks_and_comes_back(own: Path) -> None:
    module = model()
    live = stepped(torch.optim.AdamW(module.named_parameters(), lr=0.5), module)
    path = saved(own / "torch.pt", live)
    assert shown("convert", path, "folder", *ADAMW, "--model", shapes(own)) == "wrote folder\n"
    shown("convert", own / "folder", own / "back.pt")
    back = loaded(own / "back.pt")
    names = [name for name, _ in module.named_parameters()]
    assert back["param_groups"][0]["param_names"] == names
    assert same(back["state"], live.state_dict()["state"])
    assert list(content(own / "folder")["state"]) == names
    expected = copy.deepcopy(module)
    other = torch.optim.AdamW(expected.named_parameters())
    other.load_state_dict(live.state_dict())
    stepped(other, expected, 1)

    def on_a_rank(group: Any) -> bool:
        """Load the folder by names on two ranks, and compare the next step."""
        params = copy.deepcopy(module)
        zero = ZeroRedundancyOptimizer(
            params.named_parameters(), torch.optim.AdamW, group, policy="elements"
        )
        state = {"optim": by_name(zero.state_dict(), names)}
        _load_state_dict(state, ChecksumReader(own / "folder"), no_dist=True)
        numbers = {name: number for number, name in enumerate(names)}
        states = {numbers[name]: one for name, one in state["optim"]["state"].items()}
        groups = [{**state["optim"]["param_groups"][0], "params": [*numbers.values()]}]
        zero.load_state_dict({"state": states, "param_groups": groups})
        stepped(zero, params, 1)
        return same([*params.parameters()], [*expected.parameters()])

    assert LocalWorld(2).run(on_a_rank) == [True, True]


def by_name(state_dict: Any, names: list[str]) -> Any:
    states = {names[number]: entries for number, entries in state_dict["state"].items()}
    groups = [{**state_dict["param_groups"][0], "params": names}]
    return {"state": states, "param_groups": groups}


def test_between_torchs_class_and_torch_optimizer_in_8_bits(own: Path) -> None:
    module = model()
    path = saved(own / "a.pt", stepped(torch.optim.AdamW(module.named_parameters()), module))
    specs = ("--model", shapes(own))
    shown("convert", path, own / "8.pt", "--optimizer", "own:eight_bit", *specs)
    assert loaded(own / "8.pt")["state"][0]["exp_avg"].dtype == torch.float32
    direct = fo.TorchOptimizer(module.named_parameters(), fo.stored(fo.adamw(), state="int8"))
    direct.load_state_dict(loaded(path))
    assert same(direct.state_dict()["state"], loaded(own / "8.pt")["state"])
    shown("convert", own / "8.pt", own / "plain.pt", *ADAMW, *specs)
    plain = loaded(own / "plain.pt")["state"][0]
    assert plain.keys() == {"step", "exp_avg", "exp_avg_sq"}
    torch.optim.AdamW(module.parameters()).load_state_dict(loaded(own / "plain.pt"))
    names = [name for name, _ in module.named_parameters()]
    for optimizer in ("own:eight_bit", "own:made"):  # a folder has state in float32
        folder = own / optimizer[4:]
        shown("convert", own / "8.pt", folder, *specs, "--optimizer", optimizer)
        wanted = loaded(own / "plain.pt")["state"]
        assert same([content(folder)["state"][name] for name in names], [*wanted.values()])


def test_hyper_parameters_that_a_file_lacks_are_the_optimizers(own: Path) -> None:
    module = model()
    path = saved(own / "a.pt", torch.optim.AdamW(module.named_parameters(), lr=0.25))
    result = run(
        *("convert", path, own / "b.pt", "--optimizer", "own:clipped", "--model", "own:model")
    )
    assert result.exit_code == 0, result.output
    assert result.stderr == "max_norm: taken from the optimizer\n"
    (group,) = loaded(own / "b.pt")["param_groups"]
    assert (group["max_norm"], group["lr"]) == (1.0, 0.25)


def test_an_optimizer_with_a_chain_for_each_kind_of_parameter(own: Path) -> None:
    divided = load_object("own:divided")()
    module = model()
    live = stepped(fo.TorchOptimizer(module.named_parameters(), divided), module)
    path, optimizer = saved(own / "a.pt", live), ("--optimizer", "own:divided")
    shown("convert", path, own / "z", *optimizer, "--model", shapes(own))
    shown("convert", own / "z", own / "b.pt", *optimizer, "--model", shapes(own))
    assert same(loaded(own / "b.pt")["state"], loaded(path)["state"])


def test_what_needs_the_values_of_parameters_is_refused(own: Path) -> None:
    """A state that is a copy of its parameter must not become zeros."""
    module = model()
    module[0].weight.requires_grad_(False)
    free = stepped(fo.TorchOptimizer(module.named_parameters(), fo.schedule_free_adamw()), module)
    path, specs = saved(own / "free.pt", free), ("--model", shapes(own))
    optimizer = ("--optimizer", "schedule_free_adamw")
    text = failed(1, "convert", path, own / "z", *optimizer, *specs)
    assert "'0.weight': its first state is made of the parameter's values" in text
    whole = saved(own / "a.pt", stepped(torch.optim.AdamW(model().named_parameters()), model()))
    text = failed(1, "convert", whole, own / "b.pt", "--optimizer", "own:with_master", *specs)
    assert "'0.weight': its master is made of the parameter's values" in text
    assert {one.name for one in own.iterdir()} >= {"free.pt", "a.pt"}
    assert not (own / "z").exists()
    assert not (own / "b.pt").exists()


def test_parameters_without_names_are_those_of_the_model_in_order_or_refused(own: Path) -> None:
    module = model()
    plain = saved(own / "plain.pt", stepped(torch.optim.AdamW(module.parameters()), module))
    shown("convert", plain, own / "a.pt", *ADAMW, "--model", "own:model")
    names = [name for name, _ in module.named_parameters()]
    assert loaded(own / "a.pt")["param_groups"][0]["param_names"] == names
    groups = [{"params": [one]} for one in module.parameters()]
    several = saved(own / "several.pt", torch.optim.AdamW(groups))
    other = saved(own / "other.pt", torch.optim.AdamW([("elsewhere", module[0].weight)]))
    (own / "one.json").write_text("[[2, 3]]")
    (own / "turned.json").write_text("[[3, 2], [2], [5, 2], [5]]")
    for path, source, message in (
        (several, "own:model", "4 parameter groups without names"),
        (plain, own / "one.json", "4 parameters without names, the model has 1"),
        (plain, own / "turned.json", "shape"),
        (other, "own:model", "elsewhere"),
    ):
        with case(path=path.name, source=source):
            assert message in failed(1, "convert", path, own / "no.pt", *ADAMW, "--model", source)
            assert not (own / "no.pt").exists()


def test_another_optimizers_state_is_refused(own: Path) -> None:
    module = model()
    path = saved(own / "a.pt", stepped(torch.optim.Adagrad(module.named_parameters()), module))
    arguments = ("--optimizer", "lion", "--model", shapes(own))
    text = failed(1, "convert", path, own / "b.pt", *arguments)
    assert "it has ['sum'], wanted is ['exp_avg']" in text
    assert [one.name for one in own.glob("*.pt")] == ["a.pt"]


def test_wrong_arguments_exit_with_2_and_change_nothing(own: Path) -> None:
    module = model()
    path = saved(own / "a.pt", torch.optim.AdamW(module.named_parameters()))
    before = path.read_bytes()
    specs = ("--model", shapes(own))
    shown("convert", path, own / "z", *ADAMW, *specs)
    (own / "f.pt").mkdir()
    for arguments, message in (
        (("no.pt", "b.pt"), "'no.pt' does not exist"),
        ((path, "b.pt"), "name it with --optimizer, such as --optimizer torch.optim:AdamW"),
        ((path, "b.pt", *ADAMW), "give --model, such as --model my_model:build"),
        ((path, path, *ADAMW, *specs), "exists; choose another name, or add --overwrite"),
        ((path, "f.pt", *ADAMW, *specs, "--overwrite"), "f.pt is a folder; name a file"),
        ((path, "z", *ADAMW, *specs), "z exists and is not an empty folder"),
        ((path, "n", *ADAMW, *specs, "--overwrite"), "--overwrite is for files"),
        ((path, "n", *ADAMW, *specs, "--world-size", 2), "No such option"),
        ((path, "n", "--optimizer", "torch.optim:Optimizer", *specs), "no functional counterpart"),
        ((path, "n", *ADAMW, "--model", "nowhere.json"), "No such file"),
        ((path, "n", *ADAMW, *specs, "--option", "speed=1"), "speed"),
        (("z", "n.pt", *ADAMW), "give --model, such as --model my_model:build"),
        (("z", "n.pt", *specs), "--model has no effect without --optimizer"),
        (("z", "n.pt", "--option", "lr=1"), "--option is for the optimizer"),
        (("z", "n"), "z is a folder of torch.distributed.checkpoint already; name a file"),
        ((OLD, "n.pt", "--key", "a"), "--key has no effect"),
    ):
        with case(arguments=arguments):
            assert message in failed(2, "convert", *arguments)
    assert path.read_bytes() == before
    shown("convert", path, path, *ADAMW, *specs, "--overwrite")
    assert same(loaded(path)["state"], {})


def test_a_damaged_folder_exits_with_1_and_nothing_is_written(own: Path) -> None:
    module = model()
    path = saved(own / "a.pt", stepped(torch.optim.AdamW(module.named_parameters()), module))
    shown("convert", path, own / "z", *ADAMW, *FOLDER)
    shutil.copytree(OLD, own / "old")
    for folder, pattern in (("z", "*.distcp"), ("old", "*.bin")):
        data = max((own / folder).glob(pattern), key=lambda one: one.stat().st_size)
        data.write_bytes(data.read_bytes()[:-1] + b"\xff")
        for arguments in (("n.pt",), ("n", *ADAMW, *FOLDER)):
            with case(folder=folder, arguments=arguments):
                assert "it was damaged" in failed(1, "convert", own / folder, *arguments)
                assert not (own / arguments[0]).exists()


def test_a_disk_that_fills_up_leaves_no_checkpoint(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: DurableFiles, file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DurableFiles, "sync", full)
    text = failed(1, "convert", OLD, own / "n")
    assert "No space left on device" in text
    assert not (own / "n" / ".metadata").exists()


def test_a_folder_that_has_no_state_or_numbers_for_names(own: Path) -> None:
    """SGD without momentum has no state, and an optimizer given to dcp.save has no names."""
    module = model()
    plain = stepped(torch.optim.SGD(module.parameters(), lr=0.25), module)
    zero = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, LocalWorld(1).groups[0], lr=0.5
    )
    checkpoints.save(stepped(zero, module), own / "numbers")
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"optim": plain.state_dict()}, checkpoint_id=own / "none")
    for name, rate, count in (("none", 0.25, 0), ("numbers", 0.5, 4)):
        with case(name=name):
            shown("convert", own / name, own / f"{name}.pt")
            found = loaded(own / f"{name}.pt")
            assert found["param_groups"][0]["lr"] == rate
            assert found["param_groups"][0]["params"] == [0, 1, 2, 3]
            assert len(found["state"]) == count
    again = torch.optim.AdamW(module.parameters())
    again.load_state_dict(loaded(own / "numbers.pt"))
    zero.consolidate_state_dict()
    assert same(again.state_dict()["state"], zero.state_dict()["state"])
