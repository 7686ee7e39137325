"""Command ``functional-optim explain``."""

import json
from collections import OrderedDict
from collections.abc import Sequence

import click
import torch
from torch import Tensor

from functional_optim import describe
from functional_optim.commands.arguments import checked_argument, complete_algorithm
from functional_optim.commands.objects import optimizer_factory, single_values
from functional_optim.engine.stages import EXECUTORS, explain_chains
from sharding.sources import read_source
from sharding.spec import Specs
from sharding.text import escape_text


@click.command("explain", short_help="Explain how an optimizer would step a model.")
@click.argument("factory", metavar="MODULE:FACTORY", shell_complete=complete_algorithm)
@click.option(
    "--shapes",
    required=True,
    metavar="FILE",
    help="A .json file with a list of shapes, a .safetensors file, or package.module:callable that "
    "builds a module. Only shapes and dtypes are read.",
)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Keyword argument for FACTORY.",
)
@click.option(
    "--executor",
    type=click.Choice(list(EXECUTORS)),
    help="Executor.  [default: the optimizer's]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(
    *, factory: str, shapes: str, options: Sequence[str], executor: str | None, as_json: bool
) -> None:
    """Explain which executor would step which parameters of a model, and why.

    The command also prints the bytes of parameters, gradients and each field of state. It is about
    a CPU, allocates no parameters, and may compile a loop, as the first step would.
    MODULE:FACTORY is an optimizer as for `functional-optim check`.

    \b
    Examples:
      functional-optim explain adamw --shapes shapes.json
      functional-optim explain my_optimizer:make --option lr=0.1 --shapes model.safetensors
      functional-optim explain muon --shapes my_model:build --json
    A file of shapes: [[768, 768], {"path": "bias", "shape": [768], "dtype": "bfloat16"}]

    \b
    Exit codes:
      0  the explanation was printed
      1  the optimizer does not accept these parameters
      2  wrong arguments, or a file that cannot be read
    """
    values = checked_argument("--option", None, lambda: single_values(options))
    optimizer = checked_argument(
        "MODULE:FACTORY", factory, lambda: optimizer_factory(factory)(**values)
    )
    specs = checked_argument("--shapes", None, lambda: _specs(shapes))
    try:
        parts = explain_chains(optimizer, _tree(specs, "cpu"), executor)
        described = describe(optimizer, _tree(specs, "meta"))
    except ValueError as error:
        raise click.ClickException(escape_text(str(error))) from error
    if as_json:
        rows = [vars(row) for row in described.rows]
        chains = [{**one._asdict(), "chain": one.format_chain(optimizer)} for one in parts]
        content = {"optimizer": repr(optimizer), "parts": chains, "bytes": rows}
        click.echo(json.dumps(content, indent=2))
        return
    for part in parts:
        click.echo("\n  ".join((part.format_chain(optimizer), *part.lines)))
    click.echo(f"\n{described}")


def _specs(shapes: str) -> Specs:
    specs = read_source(shapes).specs
    if not specs:
        raise ValueError(f"{shapes} has no parameters; name a file or a model with at least one")
    return specs


def _tree(specs: Specs, device: str) -> dict[str, Tensor]:
    """Return parameters of these shapes. All elements of a parameter share one address."""
    # optree sorts the keys of a plain dict.
    return OrderedDict(
        (spec.path, torch.zeros((), dtype=spec.dtype, device=device).expand(spec.shape))
        for spec in specs
    )
