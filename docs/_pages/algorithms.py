"""The page of all algorithms."""

from typing import Any

import torch

import functional_optim
from docs._pages.markdown import table
from docs._pages.stories import call, formula, reference, summary
from functional_optim import algorithms, describe, functional_optim_map
from tests.cases import CASES, INPUT_CASES

OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "adam": {"amsgrad": True},
    "adamw": {"amsgrad": True},
    "rmsprop": {"momentum": 0.9, "centered": True},
}
"""Options that keep more state."""

HEAD = """# Algorithms

`functional_optim` has {count} algorithms. Each is one function on one tensor.
[What composes with what](composes-with.md) lists the ways to run them.

The column *state* is in bytes per parameter, for a float32 matrix of 1024 rows and 1024 columns.
[Storages](storage.md) make it smaller. The column *compared with* names what the
[law suite](agreement.md) holds the algorithm against.

`lbfgs` evaluates the loss several times in a step, so it takes a function beside the gradients, and
is no part of a chain. [L-BFGS](how-to/lbfgs.md) has a page of its own.
"""

ABSENT = """## Classes of torch.optim

{absent} [L-BFGS](how-to/lbfgs.md), which evaluates the loss itself, has a page of its own.
[Add an algorithm](how-to/add-an-algorithm.md) shows how to write and register one of your own.
"""


def page() -> str:
    """Return the page."""
    names = algorithms.__all__
    rows = [
        [f"[`{one}`](algorithms/{one}.md)", _summary(one), _bytes(one), _oracle(one)]
        for one in names
    ]
    parts = [HEAD.format(count=len(names))]
    parts.append(table(["algorithm", "what it does", "state", "compared with"], rows))
    missing = ", ".join(f"`{name}`" for name in absent())
    said = f"These have no equivalent: {missing}." if missing else "Each has an equivalent here."
    parts.append(ABSENT.format(absent=said))
    return "\n".join([*parts, *(_section(name) for name in names)])


def absent() -> list[str]:
    """Return the classes of torch.optim without an equivalent here."""
    classes = {
        name
        for name, one in vars(torch.optim).items()
        if isinstance(one, type) and issubclass(one, torch.optim.Optimizer)
    }
    known = {one.__name__ for one in functional_optim_map if isinstance(one, type)}
    return sorted(classes - known - {"Optimizer"})


def _section(name: str) -> str:
    made = getattr(algorithms, name)
    parts = [f"## {name}\n", f"```text\n{formula(made)}\n```\n"]
    parts.append(f"`{call(name, made)}`\n")
    fields = ", ".join(f"`{field}`" for field in _state(name, {}))
    kept = f"State: {fields}." if fields else "Without options that need it, there is no state."
    parts.append(f"{kept} Reference: {reference(made)}\n")
    return "\n".join(parts)


def _summary(name: str) -> str:
    whole = summary(getattr(algorithms, name))
    text = whole.partition(": ")[2] or whole
    return text[0].upper() + text[1:]


def _state(name: str, options: dict[str, Any]) -> dict[str, float]:
    """Return the bytes per parameter of each field of state."""
    params = torch.empty(1024, 1024, device="meta")
    optimizer = getattr(functional_optim, name)(**options)
    rows = describe(optimizer, params).rows
    return {
        row.name: row.bytes_per_parameter
        for row in rows
        if row.name not in ("parameter", "gradient", "step")
    }


def _bytes(name: str) -> str:
    shown = f"{round(sum(_state(name, {}).values()), 3):g}"
    if name in OPTIONS:
        given = ", ".join(f"{key}={value}" for key, value in OPTIONS[name].items())
        shown += f"; {round(sum(_state(name, OPTIONS[name]).values()), 3):g} with `{given}`"
    return shown


def _oracle(name: str) -> str:
    case = CASES.get(name) or INPUT_CASES[name]
    if case.oracle is None:
        return "its formula in float64"
    return f"`torch.optim.{case.oracle.__name__}`"
