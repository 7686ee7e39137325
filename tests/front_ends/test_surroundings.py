"""Other global settings of torch, other implementations of torch's classes, and quiet."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from functional_optim import TorchOptimizer, adam, as_functional_optim, from_torch

from .support import (
    CASES,
    Case,
    assert_same_entries,
    assert_same_tensors,
    parameters,
    params_of,
    set_grads,
    twins,
)

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_case
def test_another_default_device(case: Case) -> None:
    # "meta" stands for an accelerator: what is made there without being told where is seen.
    pair = twins(case)
    cls, options = case
    with torch.device("meta"):
        ours = TorchOptimizer(params_of(pair.ours), as_functional_optim(cls, **options))
        for seed in range(3):
            with torch.device("cpu"):
                set_grads(params_of(ours), seed, without={seed})
                set_grads(params_of(pair.theirs), seed, without={seed})
                pair.theirs.step()
            ours.step()
        ours.load_state_dict(ours.state_dict())
        ours.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, device="cpu"))]})
    devices = {value.device.type for entry in ours.state.values() for value in entry.values()}
    assert devices == {"cpu"}
    assert_same_tensors(params_of(ours)[:-1], params_of(pair.theirs))


@pytest.fixture
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_by_default")
@every_case
def test_another_default_dtype(case: Case) -> None:
    pair = twins(case)
    for seed in range(3):
        pair.step(seed, without={seed})
        pair.assert_same()
    got, want = pair.ours.state_dict()["state"], pair.theirs.state_dict()["state"]
    for number, entries in want.items():
        assert_same_entries(got[number], entries)
        if "step" in entries:
            assert got[number]["step"].dtype == entries["step"].dtype


@every_case
def test_no_grad(case: Case) -> None:
    pair = twins(case)
    with torch.no_grad():
        for seed in range(2):
            pair.step(seed)
    pair.assert_same()


FUSED = ["SGD momentum", "Adam amsgrad", "AdamW", "Adagrad decays"]


@pytest.mark.parametrize("name", FUSED)
def test_checkpoints_of_fused_classes(name: str) -> None:
    cls, options = CASES[name]
    fused = cls(parameters(1), fused=True, **options)
    for seed in range(2):
        set_grads(params_of(fused), seed)
        fused.step()
    fresh = twins(CASES[name])
    fresh.ours.load_state_dict(fused.state_dict())
    made = from_torch(fused)
    for (ours, theirs), entries in zip(
        zip(params_of(fresh.ours), params_of(fused), strict=True),
        made.state.leaves[0].values(),
        strict=True,
    ):
        assert_same_entries(fresh.ours.state[ours], fused.state[theirs])
        assert int(entries.step) == int(fused.state[theirs].get("step", 1))
    assert made.optimizer == as_functional_optim(cls, **options)


@pytest.mark.parametrize("name", FUSED)
def test_our_checkpoints_go_into_fused_classes(name: str) -> None:
    cls, options = CASES[name]
    pair = twins(CASES[name])
    pair.step(0)
    fused = cls(parameters(1), fused=True, **options)
    fused.load_state_dict(pair.ours.state_dict())
    set_grads(params_of(fused), 1)
    fused.step()


def test_a_second_optimizer_over_the_same_parameters() -> None:
    params, twin = parameters(1), parameters(1)
    ours = [TorchOptimizer(params, adam(0.1)), TorchOptimizer(params, adam(0.2))]
    theirs = [torch.optim.Adam(twin, lr, foreach=False) for lr in (0.1, 0.2)]
    for seed in range(3):
        for optimizer in (*ours, *theirs):
            set_grads(params_of(optimizer), seed)
            optimizer.step()
    assert_same_tensors(params, twin)


def test_construction_and_steps_raise_no_warning() -> None:
    program = """
import io, copy, torch
from functional_optim import *
params = [torch.nn.Parameter(torch.ones(3))]
for executor in ("reference", "script"):
    chained = chain(clip_by_global_norm(1.0), adamw(0.1)).using(executor=executor)
    optimizer = TorchOptimizer(params, chained)
    params[0].grad = torch.ones(3)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
live = torch.optim.AdamW(params, 0.1)
live.step()
made = from_torch(live)
live.load_state_dict(to_torch_state_dict(*made))
as_functional_optim(torch.optim.SGD, 0.1).script(params).step([torch.ones(3)])
"""
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
