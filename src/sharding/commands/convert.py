"""``functional-optim convert``: the command."""

from collections.abc import Sequence
from pathlib import Path

import click
import torch

from functional_optim.commands.arguments import checked_argument
from functional_optim.commands.objects import current_folder_first, single_values
from sharding.commands.checkpoints import (
    StateDict,
    is_folder,
    read_file,
    read_folder,
    state_dict_of,
)
from sharding.commands.conversion import (
    ModelParams,
    TargetOptimizer,
    convert_state_dict,
    layout_of_file,
    layout_of_folder,
    target_named,
    with_target_options,
    write_folder,
)
from sharding.commands.policy_choice import PolicyChoice
from sharding.policies import POLICIES
from sharding.problem import MOST_RANKS
from sharding.readable import readable
from sharding.sources import read
from sharding.spec import Specs
from sharding.zero.relayout import write_for_ranks

PLAIN_POLICIES = [name for name in POLICIES if name != "hierarchical"]
"""The policies that need no further option."""


@click.command(
    "convert",
    short_help="Convert a checkpoint of an optimizer.",
    context_settings={"show_default": True},
)
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.argument("result", type=click.Path(path_type=Path))
@click.option(
    "--optimizer",
    "optimizer_name",
    metavar="MODULE:FACTORY",
    help="The optimizer that will load RESULT: a torch.optim class, or an optimizer as for "
    "`functional-optim check`.",
)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Keyword argument for the optimizer.",
)
@click.option(
    "--model",
    metavar="MODEL",
    help="Names, shapes and dtypes of the parameters, as for `functional-optim plan`. Needed for a "
    "file; a folder has names and shapes.",
)
@click.option(
    "--world-size",
    type=click.IntRange(1, MOST_RANKS),
    help="Write a sharded folder for so many ranks. Without it, write a file.",
)
@click.option(
    "--policy",
    type=PolicyChoice(PLAIN_POLICIES),
    default="largest_first",
    help="Which rank of a folder gets which part.",
)
@click.option("--key", help="Where the optimizer's state dict is in the file, such as optimizer.")
@click.option("--overwrite", is_flag=True, help="Replace RESULT if it is a file that exists.")
def convert(
    *,
    checkpoint: Path,
    result: Path,
    optimizer_name: str | None,
    options: Sequence[str],
    model: str | None,
    world_size: int | None,
    policy: str,
    key: str | None,
    overwrite: bool,
) -> None:
    """Convert an optimizer's checkpoint to another kind, without the model's weights.

    CHECKPOINT is a file that torch.save wrote, or a folder that ZeroRedundancyOptimizer.save wrote.
    RESULT is a file with one state dict, or, with --world-size, such a folder. The file has the
    form of the optimizer that --optimizer names: plain state for a torch.optim class, the storages
    of the optimizer (8-bit state, say) for one of this package. Folder to file without --optimizer
    gives the state dict of the torch.optim class. Folder to folder without --optimizer copies the
    bits.

    A ZeroRedundancyOptimizer loads a folder of any world size without conversion.

    \b
    Examples:
      functional-optim convert checkpoints/step-1000 optimizer.pt
      functional-optim convert checkpoints/step-1000 for-16-ranks --world-size 16
      functional-optim convert training.pt sharded --key optimizer --world-size 8 \\
        --optimizer torch.optim:AdamW --model my_model:build
      functional-optim convert adamw.pt adamw-8bit.pt --model shapes.json \\
        --optimizer my_optimizer:eight_bit_adamw

    \b
    Exit codes:
      0  the result was written
      1  the checkpoint is damaged or does not fit; nothing was written
      2  wrong arguments
    """
    _check_usage(checkpoint, result, optimizer_name, model, world_size, key, overwrite=overwrite)
    target = _target(optimizer_name, options)
    specs = None
    if model is not None:
        source = model
        specs = checked_argument("--model", source, lambda: _specs(source))
    try:
        if world_size is not None and target is None:
            folder = read_folder(checkpoint)
            write_for_ranks(folder.path, result, world_size, policy, progress=_show_progress)
        else:
            state_dict, layout = _read(checkpoint, specs, model, key)
            added: list[str] = []
            if target is not None:
                state_dict, added = with_target_options(state_dict, target)
            _write(state_dict, layout, target, result, world_size, policy)
            if added:
                click.echo(f"{', '.join(added)}: taken from the optimizer", err=True)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise click.ClickException(readable(str(error))) from error
    click.echo(f"wrote {result}")


def _target(name: str | None, options: Sequence[str]) -> TargetOptimizer | None:
    """Return the optimizer that is to load the result, if one is named."""
    values = checked_argument("--option", None, lambda: single_values(options))
    if name is None:
        if values:
            raise click.UsageError("--option is for the optimizer that --optimizer names")
        return None
    return checked_argument("--optimizer", name, lambda: target_named(name, values))


def _check_usage(
    checkpoint: Path,
    result: Path,
    optimizer_name: str | None,
    model: str | None,
    world_size: int | None,
    key: str | None,
    *,
    overwrite: bool,
) -> None:
    """Refuse arguments that lack something, or that would be ignored."""
    from_folder = is_folder(checkpoint)
    if from_folder and key is not None:
        raise click.UsageError("--key is for files; a sharded folder has one optimizer")
    if not from_folder and optimizer_name is None:
        raise click.UsageError(
            "a file can be converted only for a known optimizer: name it with --optimizer, such as "
            "--optimizer torch.optim:AdamW"
        )
    if not from_folder and model is None:
        raise click.UsageError(
            "a file does not have the shapes of the parameters: give --model, such as "
            "--model my_model:build"
        )
    if from_folder and optimizer_name is None and model is not None:
        raise click.UsageError("--model has no effect without --optimizer; a folder has shapes")
    if world_size is None and result.exists() and not overwrite:
        raise click.UsageError(f"{result} exists; choose another name, or add --overwrite")
    if world_size is None and result.is_dir():
        raise click.UsageError(f"{result} is a folder; name a file, or add --world-size")
    if world_size is not None and overwrite:
        raise click.UsageError("--overwrite is for files; name a folder that does not exist")
    if world_size is not None and result.exists() and not _is_empty_folder(result):
        raise click.UsageError(f"{result} exists and is not an empty folder; name another")


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _specs(source: str) -> Specs:
    with current_folder_first():
        return read(source).specs


def _read(
    checkpoint: Path, model: Specs | None, source: str | None, key: str | None
) -> tuple[StateDict, ModelParams]:
    if is_folder(checkpoint):
        folder = read_folder(checkpoint)
        return state_dict_of(folder), layout_of_folder(folder, model)
    assert model is not None
    assert source is not None
    state_dict = read_file(checkpoint, key)
    return state_dict, layout_of_file(state_dict, model, source)


def _write(
    state_dict: StateDict,
    layout: ModelParams,
    target: TargetOptimizer | None,
    result: Path,
    world_size: int | None,
    policy: str,
) -> None:
    if world_size is not None:
        assert target is not None
        write_folder(state_dict, target, layout, result, world_size, policy, _show_progress)
        return
    found = state_dict if target is None else convert_state_dict(state_dict, target, layout)
    result.parent.mkdir(parents=True, exist_ok=True)
    part = result.with_name(f".{result.name}.part")
    try:
        torch.save(found, part)
        part.replace(result)
    finally:
        part.unlink(missing_ok=True)


def _show_progress(done: int, count: int) -> None:
    click.echo(f"[{done}/{count}] shards written", err=True)
