"""Small checkpoints of one rank, and what tests do to their files."""

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import nn

from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld

MANIFEST = "checkpoint.json"


def sharded(params: Any, **options: Any) -> Any:
    """An optimizer of one rank, in which nothing is compiled."""
    (group,) = LocalWorld(1).groups
    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, group, executor="blocked", **options)


def made(steps: int, scale: float = 1.0) -> Any:
    """An optimizer that has made so many steps."""
    params = [
        ("w", nn.Parameter(torch.arange(6.0).view(2, 3))),
        ("b", nn.Parameter(torch.tensor(2.0))),
    ]
    zero = sharded(params, lr=0.25)
    for step in range(steps):
        for _, param in params:
            param.grad = torch.full_like(param, scale * (1.0 + step))
        zero.step()
    return zero


def state_of(zero: Any) -> dict[str, Any]:
    """A copy of all its state."""
    zero.consolidate_state_dict()
    return copy.deepcopy(zero.state_dict())


def same(one: Any, other: Any) -> bool:
    """Whether two trees are equal, tensors bit for bit; the names of parameters aside."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        left, right = (
            {k: v for k, v in tree.items() if k != "param_names"} for tree in (one, other)
        )
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def table_path(folder: Path) -> Path:
    """The table of the only shard."""
    (found,) = [path for path in folder.glob("*.json") if path.name != MANIFEST]
    return found


def change(folder: Path, change_table: Callable[[dict[str, Any]], Any]) -> None:
    """Change the table of the only shard, and all checksums with it, as a forger would."""
    path = table_path(folder)
    table = read(path)
    change_table(table["tensors"])
    path.write_text(json.dumps(table))
    reseal(folder)


def change_manifest(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest, and its checksum."""
    content = read(folder / MANIFEST)
    edit(content)
    (folder / MANIFEST).write_text(json.dumps(with_crc32(content)))


def reseal(folder: Path) -> None:
    """Bring the checksums of the manifest to what the files are."""

    def enter(content: dict[str, Any]) -> None:
        for shard in content["shards"] if content["version"] > 1 else ():
            for key, ending in (("data", "bin"), ("table", "json")):
                found = (folder / f"{shard['name']}.{ending}").read_bytes()
                shard[key] = [len(found), crc32(found)]

    change_manifest(folder, enter)


def with_crc32(content: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest of version 2, with its checksum; one of version 1 has none."""
    rest = {key: value for key, value in content.items() if key != "crc32"}
    if rest.get("version") == 1:
        return rest
    return {**rest, "crc32": crc32(json.dumps(rest).encode())}


def as_version_1(folder: Path) -> None:
    """Take all checksums out, as they were not there in the first version."""

    def enter(content: dict[str, Any]) -> None:
        content["version"] = 1
        content["shards"] = [shard["name"] for shard in content["shards"]]

    change_manifest(folder, enter)
