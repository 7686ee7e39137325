"""Command ``functional-optim convert``."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
import torch

from functional_optim.commands.arguments import checked_argument
from functional_optim.commands.objects import single_values
from sharding.checkpoint.old_format import is_old_checkpoint
from sharding.commands.checkpoints import Checkpoint, StateDict, read_checkpoint
from sharding.commands.conversion import (
    TargetOptimizer,
    add_target_options,
    convert_state_dict,
    find_target,
    old_state_dict,
    params_of_file,
    params_of_old,
    sharded_state_dict,
    write_folder,
)
from sharding.sources import read_source
from sharding.spec import Specs
from sharding.text import escape_text

FILES = (".pt", ".pth")
"""Suffixes of files; every other result is a folder."""


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
    help="Names, shapes and dtypes of the parameters, as for `functional-optim plan`. A folder "
    "that ZeroRedundancyOptimizer.save wrote has names and shapes.",
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
    key: str | None,
    overwrite: bool,
) -> None:
    """Convert an optimizer's checkpoint to another kind, without the model's weights.

    CHECKPOINT is a file that torch.save wrote, a folder of torch.distributed.checkpoint, or a
    folder that ZeroRedundancyOptimizer.save wrote. RESULT is a file with one state dict if its name
    ends in .pt or .pth. Otherwise it is a folder of torch.distributed.checkpoint with the key
    "optim", which ZeroRedundancyOptimizer loads on any number of ranks.

    The result has the form of the optimizer that --optimizer names, with state in float32. If the
    optimizer has 8-bit state, these are the values that its codes have. A folder to a file without
    --optimizer gives the state dict that was saved.

    \b
    Examples:
      functional-optim convert old-checkpoints/step-1000 checkpoints/step-1000
      functional-optim convert checkpoints/step-1000 optimizer.pt
      functional-optim convert training.pt checkpoint --key optimizer \\
        --optimizer torch.optim:AdamW --model my_model:build
      functional-optim convert adamw.pt adamw-8bit.pt --model shapes.json \\
        --optimizer my_optimizer:eight_bit_adamw

    \b
    Exit codes:
      0  the result was written
      1  the checkpoint is damaged or does not fit; nothing was written
      2  wrong arguments
    """
    _check_usage(checkpoint, result, optimizer_name, model, key, overwrite=overwrite)
    target = _target(optimizer_name, options)
    specs = None
    if model is not None:
        specs = checked_argument("--model", model, partial(read_source, model)).specs
    try:
        found = read_checkpoint(checkpoint, key)
        added: list[str] = []
        if target is not None:
            state_dict, added = add_target_options(found.state_dict, target)
            found = found._replace(state_dict=state_dict)
        _write(_convert(found, target, specs, model, result), result)
        if added:
            click.echo(f"{', '.join(added)}: taken from the optimizer", err=True)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise click.ClickException(escape_text(str(error))) from error
    click.echo(f"wrote {result}")


def _target(name: str | None, options: Sequence[str]) -> TargetOptimizer | None:
    """Return the optimizer that will load the result, or None."""
    values = checked_argument("--option", None, lambda: single_values(options))
    if name is None:
        if values:
            raise click.UsageError("--option is for the optimizer that --optimizer names")
        return None
    return checked_argument("--optimizer", name, lambda: find_target(name, values))


def _check_usage(
    checkpoint: Path,
    result: Path,
    optimizer_name: str | None,
    model: str | None,
    key: str | None,
    *,
    overwrite: bool,
) -> None:
    """Raise UsageError for missing arguments, and for arguments without effect."""
    is_file, is_old = not checkpoint.is_dir(), is_old_checkpoint(checkpoint)
    to_file = result.suffix in FILES
    if is_old and key is not None:
        raise click.UsageError("--key has no effect: the folder has one optimizer")
    if is_file and optimizer_name is None:
        raise click.UsageError(
            "a file can be converted only for a known optimizer: name it with --optimizer, such as "
            "--optimizer torch.optim:AdamW"
        )
    if optimizer_name is not None and model is None and not is_old:
        raise click.UsageError(
            "the checkpoint does not have the shapes of the parameters: give --model, such as "
            "--model my_model:build"
        )
    if not is_file and optimizer_name is None and model is not None and (to_file or not is_old):
        raise click.UsageError("--model has no effect without --optimizer")
    if not is_file and not is_old and not to_file and optimizer_name is None:
        raise click.UsageError(
            f"{checkpoint} is a folder of torch.distributed.checkpoint already; name a file that "
            "ends in .pt, or add --optimizer"
        )
    if to_file and result.is_dir():
        raise click.UsageError(f"{result} is a folder; name a file")
    if to_file and result.exists() and not overwrite:
        raise click.UsageError(f"{result} exists; choose another name, or add --overwrite")
    if not to_file and overwrite:
        raise click.UsageError("--overwrite is for files; name a folder that does not exist")
    if not to_file and result.exists() and not _is_empty_folder(result):
        raise click.UsageError(f"{result} exists and is not an empty folder; name another")


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _convert(
    found: Checkpoint,
    target: TargetOptimizer | None,
    model: Specs | None,
    source: str | None,
    result: Path,
) -> StateDict:
    """Return the converted state dict."""
    to_file, old = result.suffix in FILES, found.old
    if target is None and (to_file or old is None):
        return found.state_dict
    if old is not None and not old.has_names and not to_file and model is None:
        raise ValueError(
            "the checkpoint has no names of parameters, which folders of "
            "torch.distributed.checkpoint need: give --model, such as --model my_model:build"
        )
    if old is not None and (old.has_names or model is None):
        layout = params_of_old(old, model)
    else:
        assert model is not None
        assert source is not None
        layout = params_of_file(found.state_dict, model, source)
    if target is None:
        assert old is not None
        return old_state_dict(old, layout)
    convert_to = convert_state_dict if to_file else sharded_state_dict
    return convert_to(found.state_dict, target, layout)


def _write(state_dict: StateDict, result: Path) -> None:
    result.parent.mkdir(parents=True, exist_ok=True)
    if result.suffix not in FILES:
        write_folder(state_dict, result)
        return
    part = result.with_name(f".{result.name}.part")
    try:
        torch.save(state_dict, part)
        part.replace(result)
    finally:
        part.unlink(missing_ok=True)
