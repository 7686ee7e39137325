"""Measurement of all rows: our side in this process, each other package in a separate process."""

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.agreement.ours import built, is_known, steps, tensors
from tests.agreement.problem import DTYPES, STEPS, difference, problem
from tests.agreement.row import Row
from tests.agreement.rows import comparisons, rows

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = {
    "adopt": "torch-adopt",
    "dog": "dog-optimizer",
    "adabelief_pytorch": "adabelief-pytorch",
    "adan_pytorch": "adan-pytorch",
    "came_pytorch": "came-pytorch",
    "kron_torch": "kron-torch",
    "lion_pytorch": "lion-pytorch",
    "optimi": "torch-optimi",
    "pytorch_optimizer": "pytorch-optimizer",
    "torch.optim": "torch",
}
"""Names of distributions that differ from the names of their modules."""

Distances = dict[str, list[float] | str]
"""Differences after each number of steps, by dtype, or the error of the other implementation."""


def measure(
    tell: Callable[[str], object], before: dict[str, Any], only: Sequence[str] = ()
) -> dict[str, Any]:
    """Return all results in the form in which they are stored.

    Args:
        tell: called with the name of each measurement before it starts.
        before: earlier results, which stay for packages that are not measured.
        only: packages to measure, or all packages if this is empty.
    """
    wanted = {key: row for key, row in rows().items() if is_known(row.algorithm)}
    packages = {row.package for row in wanted.values()}
    measured = sorted(packages & set(only) if only else packages)
    kept = {key: row.package for key, row in wanted.items() if row.package not in measured}
    found = {key: one for key, one in before.get("rows", {}).items() if key in kept}
    versions = {k: v for k, v in before.get("versions", {}).items() if k in kept.values()}
    for package in measured:
        tell(package)
        theirs = _results(package)
        versions[package] = version(package)
        for key, row in wanted.items():
            if row.package == package:
                found[key] = _entry(row, theirs, key)
    return {
        "steps": list(STEPS),
        "versions": dict(sorted(versions.items())),
        "rows": {key: found[key] for key in sorted(found)},
        "comparisons": before["comparisons"] if only else _compared(tell),
    }


def version(package: str) -> str:
    """Return the version of a package, without a local build tag."""
    name = DISTRIBUTIONS.get(package, package.partition(".")[0])
    return importlib.metadata.version(name).partition("+")[0]


def _results(package: str) -> dict[str, Any]:
    """Return the results of a package, which runs in a separate process."""
    command = [sys.executable, "-m", "tests.agreement.peer", package]
    # Otherwise, packages would compile their steps for each shape of the problem.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _entry(row: Row, theirs: dict[str, Any], key: str) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "algorithm": row.algorithm,
        "other": row.other,
        "differences": _distances(row, theirs[key]),
    }
    if row.coarsest is not None:
        entry["coarsest"] = row.coarsest
    if row.cause is not None:
        entry["cause"] = row.cause.text
        entry["without"] = _distances(row.experiment(), theirs[f"{key} without"])
    return entry


def _distances(row: Row, theirs: dict[str, Any]) -> Distances:
    found: Distances = {}
    for dtype in DTYPES:
        given = problem(dtype, row.shapes)
        other = theirs[str(dtype)]
        if isinstance(other, str):
            found[str(dtype)] = other
            continue
        ours = steps(built(row.algorithm, row.ours), given)
        found[str(dtype)] = [
            difference(ours[step], tensors(other[str(step)]), given.params) for step in STEPS
        ]
    return found


def _compared(tell: Callable[[str], object]) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for name, one in sorted(comparisons().items()):
        tell(f"compare_{name}")
        with contextlib.redirect_stdout(sys.stderr):  # some packages print in their constructors
            try:
                found[name] = float(one())
            except Exception as error:  # noqa: BLE001  whatever another package raises is its result
                found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found
