"""AOTInductor packages, run by a process that has torch and no source of this project."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from functional_optim import Optimizer, adamw, chain, clip_by_global_norm, export, lion, sgd
from functional_optim.export import export_step
from functional_optim.testing.cases import CASES, CHAINS

from .stages import OWN, ROW, SIGNED
from .support import (
    STEPS,
    assert_same,
    grads_of,
    job,
    run_elsewhere,
    run_in_place,
    stepped,
    tree,
)

ULPS = 8.0
"""Of the largest number in a tensor, after four steps: Inductor fuses multiplications into
additions, and computes ``start + weight * (end - start)`` for a lerp."""

OPTIMIZERS: dict[str, tuple[Optimizer, dict[str, Any]]] = {
    # Leaves of 2, 1 and 0 dimensions, several groups, a measured stage.
    "clipped": (chain(clip_by_global_norm(1.0), adamw(lr=0.1)).override(("bias",), lr=0.01), {}),
    # Functions of torch that want plain numbers; a result instead of writing in place.
    "custom": (chain(SIGNED(lr=0.1, beta=0.9)), {"in_place": False}),
    "flat": (lion(lr=0.1, weight_decay=0.1), {"dynamic": True}),
}
FEEDS = [{"lr": 0.1 / (1 + made)} for made in range(STEPS)]


def params_of(name: str, length: int) -> dict[str, Any]:
    if name == "flat":
        return {"flat": torch.linspace(-1, 1, length)}
    return tree(torch.float64 if name == "custom" else torch.float32)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_process_gets_the_same_numbers(name: str, tmp_path: Path) -> None:
    optimizer, options = OPTIMIZERS[name]
    path = tmp_path / "step.pt2"
    exported = export_step(optimizer, params_of(name, 64), path, package="aoti", **options)
    assert {file.name for file in tmp_path.iterdir()} == {"step.pt2", "step.pt2.json"}
    assert json.loads(Path(f"{path}.json").read_text("utf-8")) == exported.manifest

    params = params_of(name, 1001)
    state = optimizer.init(params)
    made = run_elsewhere(job(tmp_path, exported, params, state, FEEDS))
    assert json.loads(made["manifest"]) == exported.manifest
    new, new_state = stepped(optimizer, params, state, FEEDS)
    wanted = exported.arguments(new, grads_of(params, 0), new_state)
    assert_same([made["params"], made["states"]], [wanted[0], wanted[2]], ULPS)
    assert [int(step) for step in made["steps"]] == [STEPS] * len(wanted[3])


def test_the_layout_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(export, "write_package", lambda *_: None)
    params = tree()
    exported = export_step(adamw(), params, tmp_path / "step.pt2", package="aoti")
    grads = grads_of(params, 0)
    grads["weight"] = torch.ones(7, 5).t()
    with pytest.raises(ValueError, match=r"weight has strides \(1, 5\), .* exported for \(7, 1\)"):
        exported.arguments(params, grads, adamw().init(params))


TRACED = {
    **{name: (case.factory(), tree()) for name, case in {**CASES, **CHAINS}.items()},
    "amsgrad": (adamw(lr=0.1, amsgrad=True), tree()),
    "momentum": (sgd(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1), tree()),
    "a number of the leaf's own": (chain(OWN(lr=0.1, beta=0.5)), tree()),
    "whole tensors": (chain(ROW(lr=0.1, beta=0.5)), {"w": tree()["weight"]}),
    "complex": (adamw(lr=0.1), tree(torch.complex64)),
}


@pytest.mark.parametrize("name", TRACED)
def test_what_is_given_to_the_compiler_is_the_same_mathematics(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without compiling: the program, its numbers in tensors, run by torch's interpreter."""
    monkeypatch.setattr(export, "write_package", lambda *_: None)
    optimizer, params = TRACED[name]
    state = optimizer.init(params)
    exported = export_step(optimizer, params, tmp_path / "step.pt2", package="aoti")
    found = run_in_place(exported, exported.program.module(), params, state)
    assert_same(found, stepped(optimizer, params, state), ULPS)
