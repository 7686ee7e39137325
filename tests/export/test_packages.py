"""Tests of packages in a process that has torch, but no source of this project."""

import json
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from functional_optim import Optimizer, adamw, chain, clip_by_global_norm, sgd
from functional_optim.export import export_step
from tests.choices import case

from .stages import OWN, SIGNED
from .support import STEPS, assert_same, grads_of, job, run_elsewhere, stepped, tree


class Told(NamedTuple):
    """Export to test: an optimizer, its options, and the length of its parameters."""

    optimizer: Optimizer
    options: dict[str, Any]
    length: int = 0
    """The length of the only, flat parameter; 0 for a tree."""

    def params(self, length: int) -> dict[str, Any]:
        return {"flat": torch.linspace(-1, 1, length)} if self.length else tree()


# Leaves of 2, 1 and 0 dimensions, several groups, a measured stage.
CLIPPED = chain(clip_by_global_norm(1.0), adamw(lr=0.1)).override(("bias",), lr=0.01)
# Functions of torch that need plain numbers.
CUSTOM = chain(clip_by_global_norm(1.0), SIGNED(lr=0.1, beta=0.9))

PROGRAMS: dict[str, Told] = {
    "clipped": Told(CLIPPED, {}),
    "sgd": Told(sgd(lr=0.1, momentum=0.9, dampening=0.1), {}),
    "custom": Told(CUSTOM, {"in_place": False}),
    "flat": Told(
        chain(clip_by_global_norm(1.0), adamw(lr=0.1, weight_decay=0.1)),
        {"dynamic": True},
        length=1001,
    ),
}
FEEDS = [{"lr": 0.1 / (1 + made)} for made in range(STEPS)]


def test_another_process_gets_the_same_numbers(tmp_path: Path) -> None:
    """Packages give the same bits, and contain the manifest of the file beside."""
    exported, jobs = [], []
    for name, told in PROGRAMS.items():
        folder = tmp_path / name
        folder.mkdir()
        made = export_step(told.optimizer, told.params(64), folder / "step.pt2", **told.options)
        assert {file.name for file in folder.iterdir()} == {"step.pt2", "step.pt2.json"}
        assert json.loads((folder / "step.pt2.json").read_text("utf-8")) == made.manifest
        params = told.params(told.length)
        jobs.append(job(folder, made, params, told.optimizer.init(params), FEEDS))
        exported.append(made)
    results = run_elsewhere(jobs)
    for (name, told), made, found in zip(PROGRAMS.items(), exported, results, strict=True):
        with case(program=name):
            assert json.loads(found["manifest"]) == made.manifest
            params = told.params(told.length)
            new, new_state = stepped(told.optimizer, params, told.optimizer.init(params), FEEDS)
            wanted = made.arguments(new, grads_of(params, 0), new_state)
            assert_same([found["params"], found["states"]], [wanted[0], wanted[2]])
            assert [int(step) for step in found["steps"]] == [STEPS] * len(wanted[3])


def test_a_package_holds_no_path_of_this_machine(tmp_path: Path) -> None:
    export_step(CUSTOM, tree(), tmp_path / "step.pt2")
    here = str(Path(__file__).parents[2]).encode()
    with zipfile.ZipFile(tmp_path / "step.pt2") as archive:
        assert [name for name in archive.namelist() if here in archive.read(name)] == []


def test_the_manifest_says_all_that_a_first_step_needs(tmp_path: Path) -> None:
    """The manifest alone is enough to build the inputs and initial states of the first step."""
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
    params = {"w": torch.ones(3)}  # with ones only, the copied state looks like a constant
    entries = export_step(chain(OWN(lr=0.1, beta=0.5)), params).manifest["inputs"]
    begin = {one["name"]: one["initial"] for one in entries if one["list"] == "states"}
    assert begin == {"w.own.start": None, "w.own.pace": 2.0}


def test_numbers_without_end_are_text_in_json(tmp_path: Path) -> None:
    optimizer, params = chain(clip_by_global_norm(float("inf")), sgd(lr=0.1)), tree()
    exported = export_step(optimizer, params, tmp_path / "step.pt2")
    assert json.loads((tmp_path / "step.pt2.json").read_text())["hyper"]["max_norm"] == "inf"
    state, grads = optimizer.init(params), grads_of(params, 0)
    assert exported.arguments(params, grads, state)[-1][1] == float("inf")
