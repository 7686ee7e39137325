"""8-bit and bfloat16 state in state dicts: float32 values, which encode to the same state again."""

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    adamw,
    linear,
    sgd,
    stored,
    to_torch_state_dict,
)
from functional_optim.storage import STATE_STORAGES
from functional_optim.storage.state_storage import are_codes
from sharding import ZeroRedundancyOptimizer
from sharding.commands.convert import convert
from sharding.storage import ChecksumReader, ChecksumWriter
from tests.choices import case, each

from .support import assert_same_tensors, noise, same_bits

ROWS, COLUMNS = 13, 47
"""The weight has two full blocks of 256 elements, and a part of a third."""
OPTIMIZERS: dict[str, Optimizer] = {
    "8 bits": stored(adamw(lr=0.1, amsgrad=True), state="int8"),
    "stochastic": stored(adamw(lr=0.1, amsgrad=True), state="int8+stochastic", seed=3),
    "mixed": stored(
        adamw(lr=0.1, amsgrad=True), state={"exp_avg": "int8", "*": "bfloat16+stochastic"}
    ),
    "momentum": stored(sgd(lr=0.1, momentum=0.9, dampening=0.5), state="int8"),
    "master": stored(adamw(lr=0.1, amsgrad=True), param="bfloat16+master", state="int8"),
}


def model(name: str = "8 bits") -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(COLUMNS, ROWS).to(torch.bfloat16 if name == "master" else torch.float32)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    for step in steps:
        for place, param in enumerate(module.parameters()):
            param.grad = noise(10 * step + place, *param.shape).to(param.dtype)
        optimizer.step()


def trained(name: str, *steps: int) -> tuple[nn.Linear, TorchOptimizer]:
    module = model(name)
    optimizer = TorchOptimizer(module.parameters(), OPTIMIZERS[name])
    train(module, optimizer, *steps)
    return module, optimizer


def through_dcp(
    one: tuple[nn.Module, torch.optim.Optimizer],
    two: tuple[nn.Module, torch.optim.Optimizer],
    folder: Path,
) -> None:
    """Save one optimizer, and load the checkpoint into another one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save({"optim": get_optimizer_state_dict(*one)}, checkpoint_id=folder)
        state = {"optim": get_optimizer_state_dict(*two)}
        planner = DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(state, checkpoint_id=folder, planner=planner)
    set_optimizer_state_dict(*two, state["optim"])
    two[0].load_state_dict(one[0].state_dict())


def assert_same_entries(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for key, value in two.items():
        assert same_bits(one[key], value), key


@each(name=OPTIMIZERS, way=["torch.save", "dcp"], steps=[0, 3])
def test_a_resumed_run_has_the_codes_of_a_run_that_did_not_stop(
    name: str, way: str, steps: int, tmp_path: Path
) -> None:
    module, optimizer = trained(name, *range(steps))
    other, resumed = trained(name, *([7] if steps else []))
    if way == "dcp":
        through_dcp((module, optimizer), (other, resumed), tmp_path / f"{name} {steps}")
    else:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        other.load_state_dict(module.state_dict())
        resumed.load_state_dict(torch.load(file))
    for param, twin in zip(module.parameters(), other.parameters(), strict=True):
        assert_same_entries(resumed.state[twin], optimizer.state[param])
    for one in ((module, optimizer), (other, resumed)):
        train(*one, 10, 11)
    assert_same_tensors([*other.parameters()], [*module.parameters()])
    for param, twin in zip(module.parameters(), other.parameters(), strict=True):
        assert_same_entries(resumed.state[twin], optimizer.state[param])


@each(name=["8 bits", "stochastic", "mixed"])
def test_other_kinds_of_state_load_values_and_not_codes(name: str, tmp_path: Path) -> None:
    """A class of torch and a plain TorchOptimizer load float32 values under torch's names."""
    module, optimizer = trained(name, 0, 1)
    decoded = copy.deepcopy(optimizer.state_dict()["state"])
    readers: dict[str, Any] = {
        "torch": lambda params: torch.optim.AdamW(params, amsgrad=True),
        "ours": lambda params: TorchOptimizer(params, adamw(amsgrad=True)),
    }
    for kind, reader in readers.items():
        with case(reader=kind):
            other = model()
            plain = reader(other.parameters())
            through_dcp((module, optimizer), (other, plain), tmp_path / name / kind)
            direct = reader(model().parameters())
            direct.load_state_dict(optimizer.state_dict())
            for one in (plain, direct):
                found = one.state_dict()["state"]
                for number, entries in decoded.items():
                    assert_same_entries(found[number], entries)
            back = trained(name, 5)
            through_dcp((other, plain), back, tmp_path / name / f"{kind} back")
            for param, twin in zip(module.parameters(), back[0].parameters(), strict=True):
                assert_same_entries(back[1].state[twin], optimizer.state[param])


def test_a_state_dict_for_a_class_of_torch_has_values() -> None:
    optimizer, params = OPTIMIZERS["8 bits"], {"w": noise(1, ROWS, COLUMNS)}
    state = optimizer.init(params)
    params, state = optimizer.update(params, {"w": noise(2, ROWS, COLUMNS)}, state)
    (entries,) = to_torch_state_dict(optimizer, params, state, torch.optim.AdamW)["state"].values()
    kept = state.leaves["w"].stages[-1]
    wanted = STATE_STORAGES["int8"].decode((kept.exp_avg, kept.exp_avg_scale))
    assert entries.keys() == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert same_bits(entries["exp_avg"], wanted)


@pytest.mark.parametrize("scale", [1.0, 0.7, 3e38, 1e-30, 1e-38, 1e-45, 0.0])
@pytest.mark.parametrize("name", ["int8", "int8+stochastic"])
def test_what_was_decoded_encodes_to_the_same_values(name: str, scale: float) -> None:
    """Every code encodes to a code of the same value, and to itself if no value is subnormal."""
    storage = STATE_STORAGES[name]
    codes = torch.arange(256).to(torch.uint8)
    for sign in (1.0, -1.0):
        kept = codes, torch.tensor([sign * scale])
        value = storage.decode(kept)
        again = storage.encode(value, None, 1)
        assert same_bits(storage.decode(again), value)
        if scale > 1e-37:
            assert same_bits(again[0], codes) and same_bits(again[1], kept[1])


def old_state(module: nn.Module, optimizer: TorchOptimizer) -> dict[str, Any]:
    """Return a state dict of an earlier release: literal codes and scales, with torch's names."""
    found = copy.deepcopy(get_optimizer_state_dict(module, optimizer))
    for name, param in module.named_parameters():
        kept = optimizer.state[param]
        found["state"][name] = {
            "step": torch.tensor(float(kept["step"])),
            "exp_avg": kept["exp_avg"].clone(),
            "exp_avg_scale": kept["exp_avg_scale"].clone(),
            "exp_avg_sq": kept["exp_avg_sq"].clone(),
            "exp_avg_sq_scale": kept["exp_avg_sq_scale"].clone(),
            "max_exp_avg_sq": kept["max_exp_avg_sq"].clone(),
            "max_exp_avg_sq_scale": kept["max_exp_avg_sq_scale"].clone(),
        }
    assert found["state"]["weight"]["exp_avg"].dtype == torch.uint8
    return found


READERS: dict[str, Any] = {
    "8 bits": lambda params: TorchOptimizer(params, OPTIMIZERS["8 bits"]),
    "float32": lambda params: TorchOptimizer(params, adamw(lr=0.1, amsgrad=True)),
    "torch": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    "ZeRO": lambda params: ZeroRedundancyOptimizer(params, adamw(lr=0.1, amsgrad=True)),
    "8-bit ZeRO": lambda params: ZeroRedundancyOptimizer(params, OPTIMIZERS["8 bits"]),
}


@each(reader=READERS)
@pytest.mark.usefixtures("world_of_one")
def test_a_folder_with_codes_is_refused_and_loads_after_conversion(
    reader: str, tmp_path: Path
) -> None:
    """Codes of an earlier release are never read as numbers, and decode to the same state."""
    module, optimizer = trained("8 bits", 0, 1)
    folder, file = tmp_path / reader / "old", tmp_path / reader / "old.pt"
    old = {"optim": old_state(module, optimizer)}
    other = model()
    loading = READERS[reader](other.parameters())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(old, storage_writer=ChecksumWriter(folder))
        readers: list[Any] = [ChecksumReader(folder)]
        if isinstance(loading, ZeroRedundancyOptimizer):
            readers.append(FileSystemReader(folder))
        for one in readers:
            state = {"optim": get_optimizer_state_dict(other, loading)}
            planner = DefaultLoadPlanner(allow_partial_load=True)
            with pytest.raises(CheckpointException, match="optimizer.load_state_dict"):
                dcp.load(state, storage_reader=one, planner=planner)
        if reader == "8 bits":  # torch's reader converts codes to numbers
            dcp.load(state, checkpoint_id=folder)
            before = copy.deepcopy(loading.state_dict()["state"])
            with pytest.raises(ValueError, match="exp_avg has 8-bit codes without their scales"):
                set_optimizer_state_dict(other, loading, state["optim"])
            for number, entries in loading.state_dict()["state"].items():
                assert_same_entries(entries, before[number])
    result = CliRunner().invoke(convert, [str(folder), str(file)])
    assert result.exit_code == 0, result.output
    other.load_state_dict(module.state_dict())
    resumed = loading
    if reader in ("float32", "torch"):  # these know no codes: a stored optimizer decodes them
        stored_one = TorchOptimizer(other.parameters(), OPTIMIZERS["8 bits"])
        stored_one.load_state_dict(torch.load(file))
        resumed.load_state_dict(stored_one.state_dict())
    else:
        resumed.load_state_dict(torch.load(file))
    if isinstance(resumed, ZeroRedundancyOptimizer):
        resumed.consolidate_state_dict()
    found, wanted = resumed.state_dict()["state"], optimizer.state_dict()["state"]
    for number, entries in wanted.items():
        assert_same_entries(found[number], entries)


def test_numbers_that_are_no_codes() -> None:
    storage = STATE_STORAGES["int8"]
    for value in (noise(1, 600), noise(2, 600).square(), torch.tensor([-3.0])):
        codes, _ = storage.encode(value, None, 1)
        assert are_codes(codes.float()) and not are_codes(value)
        assert not are_codes(storage.decode(storage.encode(value, None, 1)))
    for value in ([1.0], [126.0], [127.5], [256.0], [-127.0], [float("nan")], [float("inf")]):
        assert not are_codes(torch.tensor(value))


def test_momentum_in_codes_before_the_first_step_is_no_step() -> None:
    """Codes of zeros are not zeros. The step count stays 0, so a schedule has its first value."""
    optimizer = stored(sgd(lr=linear(1.0, to=0.0, steps=4), momentum=0.9), state="int8")
    one, other = (TorchOptimizer(model().parameters(), optimizer) for _ in range(2))
    other.load_state_dict(one.state_dict())
    assert [int(entries["step"]) for entries in other.state.values()] == [0, 0]
