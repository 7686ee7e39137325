"""``functional-optim inspect``: the command."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
from torch import Tensor

from functional_optim.storage.describe import format_table
from sharding.commands.checkpoints import (
    ShardedFolder,
    StateDict,
    is_folder,
    names_in,
    read_file,
    read_folder,
)
from sharding.readable import readable, readable_name
from sharding.table import size
from sharding.zero.shard_files import check_bytes, read_step_counts


class FieldSummary(NamedTuple):
    """Field of state, over all parameters that have it."""

    name: str
    dtype: str
    tensors: int
    elements: int
    bytes: int


class Contents(NamedTuple):
    """Contents of a checkpoint."""

    kind: str
    """"state dict" or "sharded folder"."""
    parameters: int
    with_state: int
    """Parameters that have state."""
    shards: int
    """Ranks that wrote a part; 1 for a file."""
    steps: tuple[int, int] | None
    """The smallest and the largest step count, or None if there is none."""
    groups: list[dict[str, Any]]
    """The number of parameters and the options of each group."""
    fields: list[FieldSummary]
    names: list[str] | None
    """The names of the parameters, or None if the checkpoint has none."""


@click.command("inspect", short_help="Show what a checkpoint contains.")
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option("--key", help="Where the optimizer's state dict is in the file, such as optimizer.")
@click.option("--verify", is_flag=True, help="Read all files of a sharded folder, and check them.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with the parameters' names.")
def inspect_command(*, checkpoint: Path, key: str | None, verify: bool, as_json: bool) -> None:
    """Show what an optimizer's checkpoint contains, without a model.

    CHECKPOINT is a file that torch.save wrote (of a torch.optim class or of TorchOptimizer, alone
    or inside a training checkpoint), or a folder that ZeroRedundancyOptimizer.save wrote. No code
    of a file runs. Of a folder, the tables and step counts are read, and the values only with
    --verify.

    \b
    Examples:
      functional-optim inspect optimizer.pt
      functional-optim inspect training.pt --key optimizer --json
      functional-optim inspect checkpoints/step-1000 --verify

    \b
    Exit codes:
      0  the contents were printed
      1  the checkpoint is damaged, or is not an optimizer's
      2  wrong arguments
    """
    if is_folder(checkpoint) and key is not None:
        raise click.UsageError("--key is for files; a sharded folder has one optimizer")
    if verify and not is_folder(checkpoint):
        raise click.UsageError("--verify is for sharded folders; a file has no checksums")
    try:
        if is_folder(checkpoint):
            folder = read_folder(checkpoint)
            if verify:
                _verify(folder)
            contents = contents_of_folder(folder)
        else:
            contents = contents_of_file(read_file(checkpoint, key))
    except (OSError, ValueError) as error:
        raise click.ClickException(readable(str(error))) from error
    if as_json:
        content = contents._asdict() | {"fields": [one._asdict() for one in contents.fields]}
        click.echo(json.dumps(content, indent=2, default=str))
    else:
        click.echo(_text(contents))


def contents_of_file(state_dict: StateDict) -> Contents:
    """Return what a state dict contains."""
    states, groups = state_dict["state"], state_dict["param_groups"]
    named = names_in(state_dict)
    steps = [_number(entries["step"]) for entries in states.values() if "step" in entries]
    steps += [_number(group["step"]) for group in groups if "step" in group]
    tensors = (
        (str(name), str(value.dtype), value.numel(), value.nbytes)
        for entries in states.values()
        for name, value in entries.items()
        if isinstance(value, Tensor)
    )
    return Contents(
        "state dict",
        sum(len(group["params"]) for group in groups),
        sum(bool(entries) for entries in states.values()),
        1,
        _range(steps),
        [_group(len(group["params"]), group) for group in groups],
        _fields(tensors),
        None if named is None else [name for names in named for name in names],
    )


def contents_of_folder(folder: ShardedFolder) -> Contents:
    """Return what a sharded folder contains."""
    manifest = folder.manifest
    tensors = (
        (key.rpartition("/")[2], str(one.dtype), one.numel, one.numel * one.dtype.itemsize)
        for key, one in folder.tensors.items()
    )
    return Contents(
        "sharded folder",
        len(manifest.parameters),
        len({key.rpartition("/")[0] for key in folder.tensors}),
        len(manifest.shards),
        _range(read_step_counts(folder.path, folder.tensors)),
        [
            _group(len(group["params"]), {**manifest.extra, **group["options"]})
            for group in manifest.groups
        ],
        _fields(tensors),
        [name for group in manifest.groups for name in group["params"]],
    )


def _verify(folder: ShardedFolder) -> None:
    """Compare every file with its checksum.

    Raises:
        ValueError: a file is damaged.
    """
    records = folder.manifest.shards
    for number, record in enumerate(records, 1):
        click.echo(f"[{number}/{len(records)}] {record.name}.bin ... ", nl=False, err=True)
        check_bytes(folder.path, [record])
        click.echo("no checksum (version 1)" if record.data is None else "whole", err=True)


def _number(step: Any) -> int:
    return int(step.item() if isinstance(step, Tensor) else step)


def _range(steps: Iterable[int]) -> tuple[int, int] | None:
    found = list(steps)
    return (min(found), max(found)) if found else None


def _group(count: int, options: Mapping[str, Any]) -> dict[str, Any]:
    shown = {key: one for key, one in options.items() if key not in {"params", "param_names"}}
    plain = {
        key: one.tolist() if isinstance(one, Tensor) and one.numel() == 1 else one
        for key, one in shown.items()
    }
    return {"parameters": count, "options": plain}


def _fields(tensors: Iterable[tuple[str, str, int, int]]) -> list[FieldSummary]:
    """Return one row for each name and dtype."""
    found: dict[tuple[str, str], FieldSummary] = {}
    for name, full, elements, count in tensors:
        dtype = full.removeprefix("torch.")
        known = found.get((name, dtype), FieldSummary(name, dtype, 0, 0, 0))
        found[name, dtype] = FieldSummary(
            name, dtype, known.tensors + 1, known.elements + elements, known.bytes + count
        )
    return list(found.values())


def _text(contents: Contents) -> str:
    if contents.steps is None:
        steps = "no step count"
    else:
        low, high = contents.steps
        steps = f"step {low:,}" if low == high else f"steps {low:,} to {high:,}"
    parts = f", {contents.shards} shards" if contents.kind == "sharded folder" else ""
    head = (
        f"{contents.kind}{parts}: {contents.parameters:,} parameters, {contents.with_state:,} with "
        f"state, {steps}"
    )
    groups = [
        f"group {number}: {group['parameters']:,} parameters; "
        + readable(", ".join(f"{key}={value!r}" for key, value in group["options"].items()))
        for number, group in enumerate(contents.groups)
    ]
    rows = [
        (
            readable_name(one.name),
            one.dtype,
            f"{one.tensors:,}",
            f"{one.elements:,}",
            size(one.bytes),
        )
        for one in contents.fields
    ]
    table = format_table(("field", "dtype", "tensors", "elements", "bytes"), rows) if rows else ""
    return "\n".join(filter(None, (head, *groups, table)))
