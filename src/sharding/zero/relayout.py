"""A sharded checkpoint, written again for another number of ranks. No optimizer is needed."""

from collections.abc import Callable, Mapping
from pathlib import Path
from uuid import uuid4

import torch

from sharding.planning import plan
from sharding.problem import Policy
from sharding.shard_plan import ShardPlan
from sharding.spec import ParameterSpec
from sharding.zero.disk import LOCAL_DISK, Disk, put
from sharding.zero.manifest import MANIFEST, PART, Manifest, content_of, manifest_of, sealed
from sharding.zero.shard_files import (
    Ranges,
    check_bytes,
    read_ranges,
    remove_leftovers,
    write_shard,
)
from sharding.zero.tables import SavedTensor, tensors_of

Progress = Callable[[int, int], None]
"""Called with the number of shards written, and of all shards."""


def write_for_ranks(
    source: Path,
    target: Path,
    world_size: int,
    policy: str | Policy = "largest_first",
    *,
    progress: Progress = lambda done, count: None,
    disk: Disk = LOCAL_DISK,
) -> None:
    """Write a sharded checkpoint again, with one shard for each of another number of ranks.

    Values, options and storages stay the same, bit for bit. One shard is in memory at a time. The
    ranges of a shard are those of ``plan(parameters, world_size, policy)``; a tensor that does not
    have its parameter's shape is with the owner of the parameter's first element.

    Args:
        source: the folder of the checkpoint.
        target: the folder to write; it does not exist, or is empty.
        world_size: the number of ranks.
        policy: as for :func:`sharding.plan`.
        progress: called after each shard.
        disk: where the files are written.

    Raises:
        FileExistsError: the target has files.
        OSError: a file cannot be read or written.
        ValueError: the source is damaged, or the policy is unknown. Nothing is written then.
    """
    manifest = manifest_of(source)
    saved = tensors_of(source, manifest)
    by_path: dict[str, dict[str, SavedTensor]] = {}
    for key, one in saved.items():
        by_path.setdefault(key.rpartition("/")[0], {})[key] = one
    check_bytes(source, manifest.shards)
    shares = plan(_specs(manifest), world_size, policy)
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty; name a folder that does not exist")
    disk.make_folder(target)
    token, records = uuid4().hex[:8], []
    try:
        for rank in range(shares.shard_ranks):
            state = _owned(shares, rank, by_path)
            read_ranges(state, source, saved)
            records.append(write_shard(disk, target, f"{token}-{rank:05d}", state))
            progress(rank + 1, shares.shard_ranks)
        content = {**content_of(manifest), "shards": [one.to_json() for one in records]}
        put(disk, target / MANIFEST, target / PART, sealed(content))
    except BaseException:
        if not (target / MANIFEST).exists():
            remove_leftovers(disk, target, ())
        raise


def _specs(manifest: Manifest) -> list[ParameterSpec]:
    groups = {path: number for number, one in enumerate(manifest.groups) for path in one["params"]}
    return [
        ParameterSpec(path, shape, group=groups[path])
        for path, shape in manifest.parameters.items()
    ]


def _owned(
    plan: ShardPlan, rank: int, by_path: Mapping[str, Mapping[str, SavedTensor]]
) -> dict[str, Ranges]:
    """Return the ranges of a rank, with memory for them."""
    found: dict[str, Ranges] = {}
    for owned in plan.owned(rank):
        shape = plan.specs[owned.parameter].shape
        for key, one in by_path.get(owned.path, {}).items():
            if one.shape == shape and one.shape:
                start, stop = owned.start, owned.stop
            elif owned.start == 0:
                start, stop = 0, one.numel
            else:
                continue
            into = torch.empty(stop - start, dtype=one.dtype, device="cpu")
            known = found[key].parts if key in found else {}
            found[key] = Ranges(one.shape, {**known, start: into})
    return found
