"""torch.distributed.checkpoint.state_dict over a model that TorchOptimizer steps."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from functional_optim import TorchOptimizer, adamw, as_functional_optim, chain, clip_by_global_norm
from sharding import ZeroRedundancyOptimizer
from tests.choices import each

from .support import CASES, ONE_EACH, assert_same_entries, assert_same_tensors

OPTIONS = {
    "plain": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "flat names": StateDictOptions(flatten_optimizer_state_dict=True),
}
KINDS = ["torch", "ours"]

Trained = tuple[torch.nn.Module, torch.optim.Optimizer]


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))


def made(kind: str, name: str) -> Trained:
    cls, options = CASES[name]
    model = network()
    named = list(model.named_parameters())
    weights, biases = ([p for at, p in named if at.endswith(end)] for end in ("weight", "bias"))
    groups = [{"params": weights}, {"params": biases, "lr": 0.02}]
    if kind == "torch":
        torchs: Any = cls
        return model, torchs(groups, foreach=False, **options)
    return model, TorchOptimizer(groups, as_functional_optim(cls, **options))


def train(*trained: Trained, seeds: range) -> None:
    """Make steps of each model, and check that all models have the same parameters."""
    for model, optimizer in trained:
        for seed in seeds:
            data = torch.randn(5, 2, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
    first, *others = (list(model.parameters()) for model, _ in trained)
    for other in others:
        assert_same_tensors(other, first)


@each(name=ONE_EACH, writer=KINDS, reader=KINDS, option=OPTIONS, steps=[0, 2])
def test_saved_and_loaded_it_goes_on(
    name: str, writer: str, reader: str, option: str, steps: int
) -> None:
    """A checkpoint continues in torch's class and in ours. Saving and loading make no step."""
    _, options = CASES[name]
    buffers = options.get("momentum", 0.0) != 0.0 and "dampening" not in options
    if name.startswith("SGD") and not (buffers and steps):
        option = "plain"  # torch's full and flat loading need a tensor in the state
    if option != "plain" and writer == "torch":
        reader = writer  # our optimizer cannot hold options that only torch's class has
    if option == "flat names" and reader == "torch":
        writer = reader  # torch's class requires all of its options
    one, other = made(writer, name), made(reader, name)
    train(one, made("torch", name), seeds=range(steps))
    before = copy.deepcopy(list(one[0].parameters()))
    model_state, state = copy.deepcopy(get_state_dict(*one, options=OPTIONS[option]))
    assert_same_tensors(list(one[0].parameters()), before)
    set_state_dict(
        *other, model_state_dict=model_state, optim_state_dict=state, options=OPTIONS[option]
    )
    train(one, other, seeds=range(10, 12))


@each(name=["SGD", *ONE_EACH])
def test_entries_are_named_as_torch_s(name: str) -> None:
    ours, torchs = made("ours", name), made("torch", name)
    train(ours, torchs, seeds=range(2))
    got, want = (get_optimizer_state_dict(*one) for one in (ours, torchs))
    assert got.keys() == want.keys()
    for path, entries in want["state"].items():
        assert_same_entries(got["state"][path], entries)
    names = [[group["params"] for group in one["param_groups"]] for one in (got, want)]
    assert names[0] == names[1]


@each(option=OPTIONS)
def test_a_chain_that_torch_does_not_know(option: str) -> None:
    optimizer = chain(clip_by_global_norm(0.1), adamw(0.1))
    models = network(), network()
    one, two = (TorchOptimizer(model.parameters(), optimizer) for model in models)
    train((models[0], one), seeds=range(2))
    one.param_groups[0]["max_norm"] = 0.05
    models[1].load_state_dict(models[0].state_dict())
    written = get_optimizer_state_dict(models[0], one, options=OPTIONS[option])
    set_optimizer_state_dict(models[1], two, copy.deepcopy(written), options=OPTIONS[option])
    assert two.param_groups[0]["max_norm"] == 0.05
    train((models[0], one), (models[1], two), seeds=range(10, 12))


@each(writer=["ZeRO", "ours"], reader=["ZeRO", "ours"])
@pytest.mark.usefixtures("world_of_one")
def test_a_schedule_is_not_saved_and_the_reader_keeps_its_own(
    writer: str, reader: str, tmp_path: Path
) -> None:
    """A strict load. A lambda cannot be pickled, and a checkpoint of ZeRO has no rate at all."""
    kinds: dict[str, Any] = {"ZeRO": ZeroRedundancyOptimizer, "ours": TorchOptimizer}

    def trained(kind: str, first: float, *steps: int) -> Trained:
        model = network()
        optimizer = kinds[kind](model.parameters(), adamw(lr=lambda step: first / (1 + step)))
        train((model, optimizer), seeds=range(*steps))
        return model, optimizer

    one, other, twin = trained(writer, 0.1, 2), trained(reader, 0.1, 1), trained("ours", 0.1, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        folder = tmp_path / f"{writer} {reader}"
        dcp.save({"optim": get_optimizer_state_dict(*one)}, checkpoint_id=folder)
        state = {"optim": get_optimizer_state_dict(*other)}
        dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(*other, state["optim"])
    other[0].load_state_dict(one[0].state_dict())
    train(one, other, twin, seeds=range(2, 5))


@each(option=OPTIONS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_damped_momentum_is_loaded_before_the_first_step(
    option: str, tmp_path: Path
) -> None:
    """``dcp.load`` reads the momentum, although torch creates it in the first step."""
    one, other = made("ours", "SGD dampening"), made("ours", "SGD dampening")
    train(one, seeds=range(2))
    written = get_optimizer_state_dict(*one, options=OPTIONS[option])
    dcp.save({"optim": written}, checkpoint_id=tmp_path / option)
    read = {"optim": get_optimizer_state_dict(*other, options=OPTIONS[option])}
    dcp.load(read, checkpoint_id=tmp_path / option)
    set_optimizer_state_dict(*other, read["optim"], options=OPTIONS[option])
    other[0].load_state_dict(one[0].state_dict())
    train(one, other, seeds=range(10, 12))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_load_without_the_momentum_of_earlier_steps_is_refused(tmp_path: Path) -> None:
    one, other = made("ours", "SGD dampening"), made("ours", "SGD dampening")
    train(one, seeds=range(2))
    dcp.save({"optim": one[1].state_dict()}, checkpoint_id=tmp_path)
    read = {"optim": other[1].state_dict()}
    dcp.load(read, checkpoint_id=tmp_path)
    before = copy.deepcopy(other[1].state_dict())
    with pytest.raises(ValueError, match=r"stepped 2 times, .* no momentum_buffer.*dcp\.load"):
        other[1].load_state_dict(read["optim"])
    assert other[1].state_dict().keys() == before.keys()
    assert [group["lr"] for group in other[1].param_groups] == [0.1, 0.02]
