"""``functional-optim convert``: the next step is the one that would have come anyway."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import functional_optim as fo
from functional_optim.commands.objects import load_object
from sharding import ZeroRedundancyOptimizer, read_state_dict
from sharding.transport.local import LocalWorld
from sharding.zero.disk import LocalDisk
from sharding.zero.relayout import write_for_ranks
from tests.choices import case
from tests.zero_local.saved import same

from .support import failed, loaded, model, process, run, saved, shapes, shown, stepped

ADAMW = ("--optimizer", "torch.optim:AdamW")


def zero_of(group: Any, module: nn.Module) -> Any:
    """An optimizer of one rank, in which nothing is compiled."""
    params, cls = module.named_parameters(), torch.optim.AdamW
    return ZeroRedundancyOptimizer(params, cls, group, policy="elements", executor="blocked")


def after_one_step(module: nn.Module, optimizer: Any, load: Any) -> list[torch.Tensor]:
    """Parameters after one step of an optimizer that has loaded a checkpoint."""
    load(optimizer)
    stepped(optimizer, module, 1)
    return [param.detach().clone() for param in module.parameters()]


def test_a_file_of_torch_becomes_a_folder_for_any_number_of_ranks_and_comes_back(own: Path) -> None:
    module = model()
    live = stepped(torch.optim.AdamW(module.named_parameters(), lr=0.5), module)
    path = saved(own / "torch.pt", live)
    finished = process(
        *(own, "convert", path, "for-4", *ADAMW, "--model", shapes(own), "--world-size", 4)
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "wrote for-4\n"
    assert "[4/4] shards written" in finished.stderr
    assert len(list((own / "for-4").glob("*.bin"))) == 4
    shown("convert", own / "for-4", own / "for-3", "--world-size", 3, "--policy", "elements")
    shown("convert", own / "for-3", own / "back.pt")
    back = loaded(own / "back.pt")
    assert back["param_groups"][0]["param_names"] == [name for name, _ in module.named_parameters()]
    assert same(back["state"], live.state_dict()["state"])
    expected = copy.deepcopy(module)
    other = torch.optim.AdamW(expected.named_parameters())
    wanted = after_one_step(expected, other, lambda one: one.load_state_dict(live.state_dict()))

    def on_a_rank(group: Any) -> list[torch.Tensor]:
        own_module = copy.deepcopy(module)
        return after_one_step(
            own_module, zero_of(group, own_module), lambda one: one.load(own / "for-3")
        )

    for found in LocalWorld(2).run(on_a_rank):
        assert same(found, wanted)


def test_between_torchs_class_and_torch_optimizer_in_8_bits(own: Path) -> None:
    module = model()
    path = saved(own / "a.pt", stepped(torch.optim.AdamW(module.named_parameters()), module))
    specs = ("--model", shapes(own))
    shown("convert", path, own / "8.pt", "--optimizer", "own:eight_bit", *specs)
    assert loaded(own / "8.pt")["state"][0]["exp_avg"].dtype == torch.uint8
    direct = fo.TorchOptimizer(module.named_parameters(), fo.stored(fo.adamw(), state="int8"))
    direct.load_state_dict(loaded(path))
    assert same(direct.state_dict()["state"], loaded(own / "8.pt")["state"])
    shown("convert", own / "8.pt", own / "plain.pt", *ADAMW, *specs)
    plain = loaded(own / "plain.pt")["state"][0]
    assert plain.keys() == {"step", "exp_avg", "exp_avg_sq"}
    torch.optim.AdamW(module.parameters()).load_state_dict(loaded(own / "plain.pt"))
    shown("convert", own / "8.pt", own / "zero", "--optimizer", "own:eight_bit", *specs)
    shown("convert", own / "8.pt", own / "z", "--world-size", 3, *specs, "--optimizer", "own:made")
    assert same(read_state_dict(own / "z")["state"], loaded(own / "plain.pt")["state"])


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
    shown("convert", path, own / "z", *optimizer, "--model", shapes(own), "--world-size", 2)
    shown("convert", own / "z", own / "b.pt", *optimizer)
    assert same(loaded(own / "b.pt")["state"], loaded(path)["state"])


def test_what_needs_the_values_of_parameters_is_refused(own: Path) -> None:
    """A state that begins as its parameter must not become one of zeros."""
    module = model()
    module[0].weight.requires_grad_(False)
    free = stepped(fo.TorchOptimizer(module.named_parameters(), fo.schedule_free_adamw()), module)
    path, specs = saved(own / "free.pt", free), ("--model", shapes(own))
    optimizer = ("--optimizer", "schedule_free_adamw")
    text = failed(1, "convert", path, own / "z", *optimizer, *specs, "--world-size", 2)
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
    (group,) = LocalWorld(1).groups
    zero_of(group, module).save(own / "z")
    specs = ("--model", shapes(own))
    for arguments, message in (
        (("no.pt", "b.pt"), "'no.pt' does not exist"),
        ((path, "b.pt"), "name it with --optimizer, such as --optimizer torch.optim:AdamW"),
        ((path, "b.pt", *ADAMW), "give --model, such as --model my_model:build"),
        ((path, path, *ADAMW, *specs), "exists; choose another name, or add --overwrite"),
        ((path, "z", *ADAMW, *specs, "--overwrite"), "z is a folder; name a file"),
        ((path, "z", *ADAMW, *specs, "--world-size", 2), "z exists and is not an empty folder"),
        ((path, "n", *ADAMW, *specs, "--world-size", 2, "--overwrite"), "--overwrite is for files"),
        ((path, "n", *ADAMW, *specs, "--world-size", 0), "0 is not in the range"),
        ((path, "n", "--optimizer", "torch.optim:Optimizer", *specs), "no functional counterpart"),
        ((path, "n", *ADAMW, "--model", "nowhere.json"), "No such file"),
        ((path, "n", *ADAMW, *specs, "--option", "speed=1"), "speed"),
        (("z", "n.pt", "--key", "a"), "--key is for files"),
        (("z", "n.pt", *specs), "--model has no effect without --optimizer"),
        (("z", "n.pt", "--option", "lr=1"), "--option is for the optimizer"),
        (("z", "n", "--world-size", 2, "--policy", "hierarchical"), "'hierarchical' is not one of"),
    ):
        with case(arguments=arguments):
            assert message in failed(2, "convert", *arguments)
    assert path.read_bytes() == before
    shown("convert", path, path, *ADAMW, *specs, "--overwrite")
    assert same(loaded(path)["state"], {})


def test_a_damaged_folder_exits_with_1_and_nothing_is_written(own: Path) -> None:
    module = model()
    (group,) = LocalWorld(1).groups
    stepped(zero := zero_of(group, module), module)
    zero.save(own / "z")
    (data,) = (own / "z").glob("*.bin")
    data.write_bytes(data.read_bytes()[:-1] + b"\xff")
    for arguments in (("n.pt",), ("n", "--world-size", 2)):
        with case(arguments=arguments):
            assert "it was damaged" in failed(1, "convert", own / "z", *arguments)
            assert not (own / arguments[0]).exists()


def test_a_disk_that_fills_up_leaves_no_half_of_a_folder(own: Path) -> None:
    module = model()
    (group,) = LocalWorld(1).groups
    stepped(zero := zero_of(group, module), module)
    zero.save(own / "z")

    class Full(LocalDisk):
        shards = 0

        def create(self, path: Path) -> int:
            self.shards += 1
            if self.shards > 3:
                raise OSError(28, "No space left on device", str(path))
            return super().create(path)

    with pytest.raises(OSError, match="No space left"):
        write_for_ranks(own / "z", own / "n", 4, disk=Full())
    assert list((own / "n").iterdir()) == []
    with pytest.raises(FileExistsError, match="is not empty"):
        write_for_ranks(own / "z", own / "z", 4)


def test_every_element_goes_to_its_rank_once_whatever_the_state(own: Path) -> None:
    """Scales of blocks, step counts, empty and 0-d parameters, more ranks than parameters."""
    params = [
        ("wide", nn.Parameter(torch.randn(3, 300))),
        ("none", nn.Parameter(torch.randn(0, 3))),
        ("one", nn.Parameter(torch.randn(()))),
    ]
    for optimizer in (fo.adamw(), fo.stored(fo.adamw(), state="int8"), fo.rowwise_adagrad()):
        (group,) = LocalWorld(1).groups
        zero = ZeroRedundancyOptimizer(params, optimizer, group)
        for _, param in params:
            param.grad = torch.randn_like(param)
        zero.step()
        source = own / f"source-{optimizer.stages[-1].name}-{len(list(own.iterdir()))}"
        zero.save(source)
        for world_size, policy in ((1, "greedy"), (2, "elements"), (7, "largest_first")):
            with case(optimizer=optimizer, world_size=world_size, policy=policy):
                target = own / f"{source.name}-{world_size}"
                write_for_ranks(source, target, world_size, policy)
                assert same(read_state_dict(target), read_state_dict(source))
                assert len(list(target.glob("*.bin"))) == world_size
