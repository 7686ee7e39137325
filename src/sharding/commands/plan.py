"""Command ``functional-optim plan``."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from functional_optim import Optimizer
from functional_optim.commands.arguments import checked_argument
from functional_optim.commands.objects import optimizer_factory
from sharding.policies import POLICIES, REMOVED, removed
from sharding.policies.hierarchical import WITHIN
from sharding.problem import MOST_RANKS
from sharding.shard_plan import ShardPlan, plan
from sharding.sources import Source, read_source
from sharding.text import escape_name, escape_text

PICTURE_SUFFIXES = (".pdf", ".png", ".svg")
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "elements": ("align",),
    "hierarchical": ("node_size", "within"),
    "sliced": ("align",),
    "two_resource": ("align",),
}
"""The options of each policy on the command line."""


class PolicyChoice(click.Choice[str]):
    """Name of a policy. The error for a removed name has its replacement."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name.

        Raises:
            click.BadParameter: there is no such policy.
        """
        if value in REMOVED:
            self.fail(removed(value), param, ctx)
        return super().convert(value, param, ctx)


@click.command(
    "plan",
    short_help="Show which rank would own what.",
    context_settings={"show_default": True},
)
@click.option(
    "--model",
    "source",
    required=True,
    metavar="MODEL",
    help="package.module:callable (makes a module, on the meta device), a .safetensors file (only "
    "its header is read), or a .json file with a list of shapes.",
)
@click.option("--world-size", type=click.IntRange(1, MOST_RANKS), required=True, help="Ranks.")
@click.option(
    "--policy", type=PolicyChoice(list(POLICIES)), default="largest_first", help="Who gets what."
)
@click.option(
    "--optimizer",
    "optimizer_name",
    metavar="OPTIMIZER",
    default="adamw",
    help="Whose state and FLOPs are counted and levelled: an algorithm, with its default options, "
    "or package.module:name of an optimizer or of a function that builds one. none: elements are "
    "levelled.",
)
@click.option("--align", type=click.IntRange(min=1), help="elements: cut at such multiples.")
@click.option("--node-size", type=click.IntRange(min=1), help="hierarchical: ranks on a node.")
@click.option(
    "--within", type=click.Choice(list(WITHIN)), help="hierarchical: the policy on a node."
)
@click.option("--rows", type=click.IntRange(min=1), default=16, help="Ranks shown at most.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers of every rank as JSON.")
@click.option(
    "--save", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan, as JSON."
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the bytes on each rank."
)
def plan_command(
    *,
    source: str,
    world_size: int,
    policy: str,
    optimizer_name: str,
    rows: int,
    as_json: bool,
    save: Path | None,
    plot: Path | None,
    **options: Any,
) -> None:
    """Show which rank would own how much of a model, and what a step would send.

    Nothing is allocated and no process is started: the command reads shapes only. Bytes are those
    of the parameters that a rank owns, their gradients, and their optimizer state. The makespan is
    the floating-point operations of the rank that steps longest. Both are compared with their mean
    and with a lower bound.

    \b
    Examples:
      functional-optim plan --model my_model:build --world-size 8
      functional-optim plan --model my_model:build --world-size 64 \\
        --policy two_resource --optimizer my_model:muon_and_adamw
      functional-optim plan --model model.safetensors --world-size 64 \\
        --policy hierarchical --node-size 8
      functional-optim plan --model shapes.json --world-size 2 --save plan.json
    A file of shapes: [[768, 768], {"path": "bias", "shape": [768], "dtype": "bfloat16"}]
    A matrix with blocks: {"shape": [2304, 768], "kind": "per_matrix", "blocks": {"row_blocks": 3}}

    \b
    Exit codes:
      0  the plan was printed
      1  a file cannot be written
      2  wrong arguments, or a model that cannot be read
    """
    given = {name: value for name, value in options.items() if value is not None}
    _check_options(policy, given)
    if plot is not None and plot.suffix.lower() not in PICTURE_SUFFIXES:
        raise click.BadParameter(
            f"a picture's name must end in {', '.join(PICTURE_SUFFIXES)}, got {str(plot)!r}",
            param_hint="--plot",
        )
    optimizer = None
    if optimizer_name != "none":
        optimizer = checked_argument("--optimizer", None, partial(_build_optimizer, optimizer_name))
    found = _read(source, optimizer)
    try:
        shards = plan(found.specs, world_size, policy, optimizer, **given)
    except ValueError as error:
        raise click.UsageError(escape_text(str(error))) from error
    _print(shards, optimizer, found, rows, as_json=as_json)
    _write(shards, optimizer, save, plot, as_json=as_json)


def _print(
    shards: ShardPlan, optimizer: Optimizer | None, found: Source, rows: int, *, as_json: bool
) -> None:
    if as_json:
        numbers = shards.report(optimizer)
        ranks = [
            {"rank": rank, **{name: column[rank] for name, column in numbers.columns.items()}}
            for rank in range(shards.shard_ranks)
        ]
        content = {
            "policy": shards.policy,
            "world_size": shards.world_size,
            "replicas": shards.replicas,
            "digest": shards.digest,
            "makespan": {
                "flops": numbers.makespan,
                "over_mean": numbers.imbalance("flops"),
                "over_bound": numbers.makespan_over_bound,
            },
            "memory": {
                "bytes": numbers.memory,
                "over_mean": numbers.imbalance(),
                "over_bound": numbers.memory_over_bound,
            },
            "ranks_of_one_replica": ranks,
            "left_out": found.left_out,
        }
        click.echo(json.dumps(content, indent=2))
        return
    click.echo(shards.table(optimizer, rows=rows))
    if found.left_out:
        click.echo(
            f"left out, because no parameter has their dtype: {len(found.left_out):,} tensors, "
            f"the first is {escape_name(found.left_out[0])}"
        )
    click.echo(f"digest {shards.digest}")


def _check_options(policy: str, given: Mapping[str, Any]) -> None:
    """Raise UsageError for options that the policy does not have, or lacks."""
    policies = (policy, given.get("within", policy))
    for name in given:
        if not any(name in OPTIONS.get(one, ()) for one in policies):
            owner = next(one for one, names in OPTIONS.items() if name in names)
            raise click.UsageError(
                f"--{name.replace('_', '-')} is an option of the policy {owner!r}, not of "
                f"{policy!r}"
            )
    if policy == "hierarchical" and "node_size" not in given:
        raise click.UsageError("the policy 'hierarchical' needs --node-size")


def _build_optimizer(name: str) -> Optimizer:
    return optimizer_factory(name)()


def _read(source: str, optimizer: Optimizer | None) -> Source:
    try:
        return read_source(source, optimizer)
    except Exception as error:  # the function of a model can raise any error
        text = escape_text(f"{source}: {error}")
        raise click.BadParameter(text, param_hint="--model") from error


def _write(
    shards: ShardPlan,
    optimizer: Optimizer | None,
    save: Path | None,
    plot: Path | None,
    *,
    as_json: bool,
) -> None:
    try:
        if save is not None:
            save.write_text(shards.to_json(), encoding="utf-8")
            click.echo(f"the plan: {save}", err=as_json)
        if plot is not None:
            shards.plot(plot, optimizer)
            click.echo(f"the picture: {plot}", err=as_json)
    except OSError as error:
        raise click.ClickException(
            f"{error.filename} cannot be written: {error.strerror}"
        ) from error
