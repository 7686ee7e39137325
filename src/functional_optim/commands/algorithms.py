"""``functional-optim list``: the command."""

import json
from collections.abc import Sequence
from inspect import getdoc
from typing import NamedTuple

import click
import torch

import functional_optim
from functional_optim import algorithms, describe
from functional_optim.frontends.torch_interop import torch_class_of
from functional_optim.optimizer import Optimizer
from functional_optim.storage.describe import format_table

SHAPE = "1024,1024"


class Algorithm(NamedTuple):
    """Row of the list of algorithms."""

    name: str
    state_bytes_per_parameter: float
    """Bytes of state per element of a parameter of the given shape, including the step count."""
    state: tuple[str, ...]
    """The names of the state fields."""
    torch_class: str | None
    """The class of torch.optim with the same mathematics, or None."""
    summary: str
    """The first line of its documentation."""


def _shape(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Return a shape from a text such as ``1024,1024``."""
    sizes = value.split(",")
    if not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise click.BadParameter(f"must be whole numbers such as {SHAPE}, got {value!r}")
    return tuple(map(int, sizes))


@click.command("list", short_help="List the algorithms and the size of their state.")
@click.option(
    "--shape",
    callback=_shape,
    default=SHAPE,
    show_default=True,
    help="Shape of the parameter whose state is counted. The state of matrix algorithms "
    "depends on it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def list_command(*, shape: tuple[int, ...], as_json: bool) -> None:
    """List the algorithms, with the bytes of state that each keeps per parameter.

    A parameter is one number here: AdamW keeps two float32 numbers for each, so 8 bytes. Parameters
    are float32, and each algorithm has its default options. Nothing is allocated.

    \b
    Examples:
      functional-optim list
      functional-optim list --shape 4096,1024
      functional-optim list --json | jq '.[] | select(.state_bytes_per_parameter < 5) | .name'

    \b
    Exit codes:
      0  the list was printed
      2  wrong arguments
    """
    found = [describe_algorithm(name, shape) for name in algorithms.__all__]
    if as_json:
        click.echo(json.dumps([one._asdict() for one in found], indent=2))
    else:
        click.echo(_table(found))


def describe_algorithm(name: str, shape: Sequence[int]) -> Algorithm:
    """Return the row of an algorithm, for a parameter of this shape."""
    constructor = getattr(functional_optim, name)
    optimizer = constructor()
    described = describe(optimizer, torch.empty(shape, device="meta"))
    known = {"parameter", "gradient", "step"}
    return Algorithm(
        name,
        described.state_bytes / described.numel,
        tuple(row.name for row in described.rows if row.name not in known),
        _torch_class(optimizer),
        (getdoc(constructor) or "").partition("\n")[0],
    )


def _torch_class(optimizer: Optimizer) -> str | None:
    try:
        found = torch_class_of(optimizer)
    except ValueError:
        return None
    return f"torch.optim.{found.__name__}" if found.__module__.startswith("torch.") else None


def _table(found: Sequence[Algorithm]) -> str:
    heads = ("algorithm", "bytes", "state", "equals")
    rows = [
        (
            one.name,
            f"{one.state_bytes_per_parameter:.3f}",
            ", ".join(one.state) or "none",
            one.torch_class or "",
        )
        for one in found
    ]
    return format_table(heads, rows)
