"""Command ``functional-optim inspect``."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from torch import Tensor

from functional_optim.storage.describe import format_table
from sharding.checkpoint.old_format import is_old_checkpoint
from sharding.commands.checkpoints import Checkpoint, names_in, read_checkpoint
from sharding.text import escape_name, escape_text, format_bytes


@click.command("inspect", short_help="Show what a checkpoint contains.")
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option("--key", help="Where the optimizer's state dict is in the file, such as optimizer.")
@click.option("--verify", is_flag=True, help="Compare all files of a folder with their checksums.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with the parameters' names.")
def inspect_command(*, checkpoint: Path, key: str | None, verify: bool, as_json: bool) -> None:
    """Show what an optimizer's checkpoint contains, without a model.

    CHECKPOINT is a file that torch.save wrote (of a torch.optim class or of TorchOptimizer, alone
    or inside a training checkpoint), a folder of torch.distributed.checkpoint, or a folder that
    ZeroRedundancyOptimizer.save wrote. No code of a file runs. Of a folder of
    torch.distributed.checkpoint, the metadata, options and step counts are read, and the values
    only with --verify, which needs the checksums that sharding.storage.ChecksumWriter writes.

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
    if verify and not checkpoint.is_dir():
        raise click.UsageError("--verify is for folders; a file has no checksums")
    if key is not None and checkpoint.is_dir() and is_old_checkpoint(checkpoint):
        raise click.UsageError("--key has no effect: the folder has one optimizer")
    try:
        if verify and not is_old_checkpoint(checkpoint):  # read_checkpoint verifies an old one
            _verify(checkpoint)
        contents = contents_of(read_checkpoint(checkpoint, key, values=False))
    except (OSError, ValueError) as error:
        raise click.ClickException(escape_text(str(error))) from error
    if as_json:
        click.echo(json.dumps(contents, indent=2, default=str))
    else:
        click.echo(_format_contents(contents))


def contents_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a summary of a checkpoint, as JSON shows it."""
    state_dict = checkpoint.state_dict
    states, groups = state_dict["state"], state_dict["param_groups"]
    names = names_in(state_dict)
    steps = [_number(entries["step"]) for entries in states.values() if "step" in entries]
    steps += [_number(group["step"]) for group in groups if "step" in group]
    tensors = (
        (str(name), str(value.dtype), value.numel(), value.nbytes)
        for entries in states.values()
        for name, value in entries.items()
        if isinstance(value, Tensor)
    )
    return {
        "kind": checkpoint.kind,
        "parameters": sum(len(group["params"]) for group in groups),
        "with_state": sum(bool(entries) for entries in states.values()),
        "files": checkpoint.files,
        "steps": (min(steps), max(steps)) if steps else None,
        "groups": [_group(group) for group in groups],
        "fields": _fields(tensors),
        "names": None if names is None else [name for own in names for name in own],
    }


def _verify(folder: Path) -> None:
    """Compare every file with its checksum.

    Raises:
        OSError, ValueError: a file is missing or damaged, or there are no checksums.
    """
    from sharding.storage.checksums import read_checksums  # noqa: PLC0415  slow to import
    from sharding.storage.files import check_file  # noqa: PLC0415  slow to import

    files = read_checksums(folder).files
    for number, (name, wanted) in enumerate(files.items(), 1):
        click.echo(f"[{number}/{len(files)}] {name} ... ", nl=False, err=True)
        check_file(folder / name, wanted)
        click.echo("whole", err=True)


def _number(step: Any) -> int:
    return int(step.item() if isinstance(step, Tensor) else step)


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {
        key: one.tolist() if isinstance(one, Tensor) and one.numel() == 1 else one
        for key, one in group.items()
        if key not in {"params", "param_names"}
    }
    return {"parameters": len(group["params"]), "options": options}


def _fields(tensors: Iterable[tuple[str, str, int, int]]) -> list[dict[str, Any]]:
    """Return one row for each name and dtype, with sums over all parameters."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name, full, elements, count in tensors:
        dtype = full.removeprefix("torch.")
        start = {"name": name, "dtype": dtype, "tensors": 0, "elements": 0, "bytes": 0}
        row = found.setdefault((name, dtype), start)
        row["tensors"] += 1
        row["elements"] += elements
        row["bytes"] += count
    return list(found.values())


def _format_contents(contents: Mapping[str, Any]) -> str:
    kind, steps = contents["kind"], "no step count"
    if contents["steps"] is not None:
        low, high = contents["steps"]
        steps = f"step {low:,}" if low == high else f"steps {low:,} to {high:,}"
    parts = f", {contents['files']} files" if kind != "state dict" else ""
    head = (
        f"{kind}{parts}: {contents['parameters']:,} parameters, {contents['with_state']:,} with "
        f"state, {steps}"
    )
    groups = [
        f"group {number}: {group['parameters']:,} parameters; "
        + escape_text(", ".join(f"{key}={value!r}" for key, value in group["options"].items()))
        for number, group in enumerate(contents["groups"])
    ]
    rows = [
        (
            escape_name(one["name"]),
            one["dtype"],
            f"{one['tensors']:,}",
            f"{one['elements']:,}",
            format_bytes(one["bytes"]),
        )
        for one in contents["fields"]
    ]
    table = format_table(("field", "dtype", "tensors", "elements", "bytes"), rows) if rows else ""
    return "\n".join(filter(None, (head, *groups, table)))
