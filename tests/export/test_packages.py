"""Packages, run by a process that has torch and no source of this project."""

import json
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from functional_optim import Optimizer, adamw, chain, clip_by_global_norm, lion, sgd
from functional_optim.export import export_step

from .stages import OWN, SIGNED
from .support import STEPS, assert_same, grads_of, job, run_elsewhere, stepped, tree

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": adamw(lr=0.1, amsgrad=True),
    "sgd": sgd(lr=0.1, momentum=0.9, dampening=0.1, nesterov=False),
    "lion": lion(lr=0.1, weight_decay=0.1),
    "clipped": chain(clip_by_global_norm(1.0), adamw(lr=0.1)).override(("bias",), lr=0.01),
    "custom": chain(clip_by_global_norm(1.0), SIGNED(lr=0.1, beta=0.9)),
}
FEEDS = [{"lr": 0.1 / (1 + made)} for made in range(STEPS)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_process_gets_the_same_numbers(name: str, tmp_path: Path) -> None:
    optimizer, params, path = OPTIMIZERS[name], tree(), tmp_path / "step.pt2"
    state = optimizer.init(params)
    exported = export_step(optimizer, params, path, in_place=name not in ("lion", "custom"))
    assert {file.name for file in tmp_path.iterdir()} == {"step.pt2", "step.pt2.json"}
    assert json.loads(Path(f"{path}.json").read_text("utf-8")) == exported.manifest

    made = run_elsewhere(job(tmp_path, exported, params, state, FEEDS))
    assert json.loads(made["manifest"]) == exported.manifest
    new, new_state = stepped(optimizer, params, state, FEEDS)
    wanted = exported.arguments(new, grads_of(params, 0), new_state)
    assert_same([made["params"], made["states"], made["steps"]], [wanted[0], *wanted[2:4]])
    assert [int(step) for step in made["steps"]] == [STEPS] * 3


def test_a_package_holds_no_path_of_this_machine(tmp_path: Path) -> None:
    export_step(OPTIMIZERS["clipped"], tree(), tmp_path / "step.pt2")
    here = str(Path(__file__).parents[2]).encode()
    with zipfile.ZipFile(tmp_path / "step.pt2") as archive:
        assert [name for name in archive.namelist() if here in archive.read(name)] == []


def test_the_manifest_says_all_that_a_first_step_needs(tmp_path: Path) -> None:
    """From the manifest alone: inputs made in its order, states as it says they begin."""
    optimizer, params = sgd(lr=0.1, momentum=0.9, weight_decay=0.5), tree()
    exported = export_step(optimizer, params, tmp_path / "step.pt2")
    made = json.loads((tmp_path / "step.pt2.json").read_text("utf-8"))
    state, grads = optimizer.init(params), grads_of(params, 0)
    lists: dict[str, list[torch.Tensor]] = {"params": [], "grads": [], "states": [], "steps": []}
    lists["hyper"] = []
    for entry in made["inputs"]:
        dtype = getattr(torch, entry["dtype"])
        value = {
            "params": lambda e: params[e["name"]].clone(),
            "grads": lambda e: grads[e["name"]],
            "states": lambda e, dtype=dtype: torch.full(
                e["shape"], float(e["initial"]), dtype=dtype
            ),
            "steps": lambda e, dtype=dtype: torch.zeros(e["shape"], dtype=dtype),
            "hyper": lambda e, dtype=dtype: torch.tensor(made["hyper"][e["name"]], dtype=dtype),
        }[entry["list"]](entry)
        assert list(value.shape) == entry["shape"]
        assert value.dtype == dtype
        lists[entry["list"]].append(value)
    wanted = exported.arguments(params, grads, state)
    assert_same(list(lists.values()), list(wanted))
    assert made["inputs"][6]["name"] == "bias.sgd.momentum_buffer[0]"
    assert str(made["inputs"][6]["initial"]) == "-0.0"
    assert made["chain"].startswith("maximize(maximize=False) -> weight_decay(")
    assert made["versions"]["torch"] == torch.__version__
    assert made["versions"]["python"].startswith(f"{sys.version_info.major}.")


def test_states_that_do_not_begin_alike_everywhere() -> None:
    params = {"w": torch.ones(3)}  # all ones: the state that copies it looks like a constant
    entries = export_step(chain(OWN(lr=0.1, beta=0.5)), params).manifest["inputs"]
    begin = {one["name"]: one["initial"] for one in entries if one["list"] == "states"}
    assert begin == {"w.own.start": None, "w.own.pace": 2.0}


def test_numbers_without_end_are_text_in_json(tmp_path: Path) -> None:
    optimizer, params = chain(clip_by_global_norm(float("inf")), sgd(lr=0.1)), tree()
    exported = export_step(optimizer, params, tmp_path / "step.pt2")
    assert json.loads((tmp_path / "step.pt2.json").read_text())["hyper"]["max_norm"] == "inf"
    state, grads = optimizer.init(params), grads_of(params, 0)
    assert exported.arguments(params, grads, state)[-1][1] == float("inf")
