"""Helpers of the tests of exports: parameters, and steps of the reference executor."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from functional_optim import Optimizer, State
from functional_optim.export import ExportedStep
from functional_optim.testing.compare import close, same

STEPS = 4


def tree(dtype: torch.dtype = torch.float32) -> dict[str, Tensor | None]:
    """Return parameters of several shapes; one leaf is None."""
    draws = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws, dtype=torch.float64).to(dtype)

    return {"weight": drawn(5, 7), "frozen": None, "bias": drawn(9), "scale": drawn()}


def grads_of(params: Mapping[str, Tensor | None], step: int) -> dict[str, Tensor | None]:
    draws = torch.Generator().manual_seed(100 + step)
    return {
        name: None
        if param is None
        else torch.randn(param.shape, generator=draws, dtype=torch.float32).to(param.dtype)
        for name, param in params.items()
    }


def copied(values: Any) -> Any:
    return optree.tree_map(torch.clone, values)


def assert_same(got: Any, want: Any, ulps: float = 0.0) -> None:
    """Check that two trees are equal bit for bit, or within ulps of each tensor's largest value."""
    ours, spec = optree.tree_flatten(got)
    theirs, other = optree.tree_flatten(want)
    assert spec == other
    for a, b in zip(ours, theirs, strict=True):
        exact = ulps == 0.0 or not (a.is_floating_point() or a.is_complex())
        assert same(a, b) if exact else close(a, b, ulps), (a, b)


def stepped(
    optimizer: Optimizer,
    params: Any,
    state: State,
    feeds: Iterable[dict[str, float]] = ({},) * STEPS,
) -> tuple[Any, State]:
    """Return params and state after steps of the reference executor, as a pure function."""
    optimizer = optimizer.using(executor="reference")
    for step, hyper in enumerate(feeds):
        params, state = optimizer.update(params, grads_of(params, step), state, **hyper)
    return params, state


def run_in_place(
    exported: ExportedStep,
    run: Callable[..., Any],
    params: Any,
    state: State,
    feeds: Iterable[dict[str, float]] = ({},) * STEPS,
) -> tuple[Any, State]:
    """Return params and state after steps of a program in place, on copies."""
    params, state = copied(params), copied(state)
    for step, hyper in enumerate(feeds):
        run(*exported.arguments(params, grads_of(params, step), state, **hyper))
    return params, state


OTHER_PROCESS = '''
import sys


class Refused:
    """No source of ours may be imported."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("functional_optim", "sharding", "hooks"):
            raise ImportError(f"{name} is not there")
        return None


sys.meta_path.insert(0, Refused())

import json
import warnings

import torch


def run(job):
    given = torch.load(job["given"])
    extra = {"manifest.json": ""}
    step = torch.export.load(job["path"], extra_files=extra).module()
    text = extra["manifest.json"]
    params, states, steps = given["params"], given["states"], given["steps"]
    for grads, hyper in given["feeds"]:
        with torch.no_grad():
            made = step(params, grads, states, steps, hyper)
        if not json.loads(text)["in_place"]:
            params, states, steps = made
    torch.save({"params": params, "states": states, "steps": steps, "manifest": text}, job["made"])


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for job in json.loads(sys.argv[1]):
        run(job)
assert not [name for name in sys.modules if name.split(".")[0] == "functional_optim"]
'''


def job(
    folder: Path,
    exported: ExportedStep,
    params: Any,
    state: State,
    feeds: Iterable[dict[str, float]] = ({},) * STEPS,
) -> dict[str, str]:
    """Save the inputs with which another process runs a package."""
    calls = [
        exported.arguments(params, grads_of(params, step), state, **hyper)
        for step, hyper in enumerate(feeds)
    ]
    first = dict(zip(("params", "grads", "states", "steps"), copied(calls[0][:4]), strict=True))
    torch.save({**first, "feeds": [(call[1], call[4]) for call in calls]}, folder / "given.pt")
    return {
        "given": str(folder / "given.pt"),
        "path": str(exported.path),
        "made": str(folder / "made.pt"),
    }


def run_elsewhere(jobs: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Run packages in a new process that cannot import this package."""
    finished = subprocess.run(
        [sys.executable, "-I", "-c", OTHER_PROCESS, json.dumps(jobs)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return [torch.load(job["made"]) for job in jobs]
