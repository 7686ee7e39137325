"""Checkpoints: each rank writes its part, and any other number of ranks reads what it needs."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from torch import Tensor

from functional_optim.core.brief import some
from functional_optim.frontends.torch_groups import options_of
from sharding.zero.check_saved import check_tensors
from sharding.zero.collective import together
from sharding.zero.convert import Targets, gets_digits
from sharding.zero.disk import LOCAL_DISK, Disk, put
from sharding.zero.load import check_known, check_numbers, numbers_taken, with_options
from sharding.zero.manifest import MANIFEST, PART, Manifest, manifest_of, record_of, sealed
from sharding.zero.parts import OptimizerParts, own_state
from sharding.zero.restore import SavedState, read_state
from sharding.zero.shard_files import (
    check_bytes,
    check_written,
    remove_leftovers,
    write_shard,
)
from sharding.zero.stream import Plain
from sharding.zero.tables import names_by_path, tensors_of


def save(parts: OptimizerParts, folder: Path, disk: Disk = LOCAL_DISK) -> None:
    """Write this rank's part of the state, and with the others, the whole. Collective.

    Until the manifest is in place, which it is at once, the checkpoint that was there before is the
    valid one. Everything is synced before that, and the old shards are removed after it.
    """
    ranks = partial(together, parts.process_group, parts.device)

    content: dict[str, Any] = {}
    before: list[str] = []

    def begin() -> str | None:
        content.update(_content(parts))
        if parts.rank != 0:
            return None
        disk.make_folder(folder)
        before.extend(_shards_to_keep(folder))
        remove_leftovers(disk, folder, before)
        return uuid4().hex[:8]

    def write_own(name: str) -> dict[str, Any] | None:
        disk.make_folder(folder)
        if parts.rank >= parts.plan.shard_ranks:  # of replicas, the first one writes
            return None
        return write_shard(disk, folder, name, own_state(parts)).to_json()

    def commit(shards: list[dict[str, Any]]) -> None:
        if parts.rank != 0:
            return
        try:
            check_written(folder, [record_of(one) for one in shards])
            put(disk, folder / MANIFEST, folder / PART, sealed({**content, "shards": shards}))
        except BaseException:
            # The new manifest may be there and not be durable: both stay that may be valid.
            remove_leftovers(disk, folder, [*before, *_shards_to_keep(folder)])
            raise
        remove_leftovers(disk, folder, [one["name"] for one in shards])

    token = ranks("begin a checkpoint", begin)[0]
    name = f"{token}-{parts.rank:05d}"
    found = ranks("write its part of the checkpoint", lambda: write_own(name))
    ranks("complete the checkpoint", lambda: commit([one for one in found if one is not None]))


def _shards_to_keep(folder: Path) -> list[str]:
    """The shards of the checkpoint in a folder, where there is one.

    Raises:
        ValueError: the folder has a manifest of something else, which is not to be overwritten.
    """
    try:
        return [shard.name for shard in manifest_of(folder).shards]
    except FileNotFoundError:
        return []  # what lies here was never complete
    except ValueError as error:
        raise ValueError(
            f"there is a {MANIFEST} already, and it is of no checkpoint that can be read: {error}. "
            "Nothing was changed: save to another folder, or remove that file"
        ) from error


def _content(parts: OptimizerParts) -> dict[str, Any]:
    """Return the content of a manifest, without the shards."""
    trained = [path for path, param in parts.params.items() if param.requires_grad]
    named = list(Targets(parts.known_shards, parts.groups).named(parts.params, trained))
    plain = [target.plain for _, _, target in named]
    return {
        "parameters": {path: list(param.shape) for path, param in parts.params.items()},
        "groups": [
            {
                "params": paths,
                "options": {**_plain_options(group), **_options_beside(parts, number)},
            }
            for number, (group, paths) in enumerate(
                zip(parts.groups, _paths_of_groups(parts), strict=True)
            )
        ],
        "form": {"counts_steps": parts.schema.counts_steps, "eager": parts.schema.eager},
        "extra": dict(parts.schema.options),
        "stored": any(one.stored for one in plain),
        "fields": list(dict.fromkeys(field for one in plain for field in one.dtypes)),
        "starts_late": [path for path, param, target in named if target.starts_late(param)],
    }


def load(parts: OptimizerParts, folder: Path) -> list[str]:
    """Read this rank's part, whoever wrote it. Collective.

    No rank changes anything before all have found that it fits, and that no file was damaged: each
    reads some of the files whole for that.

    Returns:
        The parameters that were given digits by their owners, and are to be gathered.
    """
    ranks = partial(together, parts.process_group, parts.device)

    found: list[Loading] = []
    ranks("load the checkpoint", lambda: found.append(_checked(parts, folder)))
    return ranks("read the checkpoint", lambda: _read(parts, found[0]))[parts.rank]  # type: ignore[no-any-return]


class Loading(NamedTuple):
    """A checkpoint that fits."""

    groups: list[dict[str, Any]]
    """The parameter groups as they will be."""
    source: SavedState


def _checked(parts: OptimizerParts, folder: Path) -> Loading:
    shards = parts.known_shards
    manifest = manifest_of(folder)
    saved = tensors_of(folder, manifest)
    _check_parameters(parts, manifest)
    groups = _new_groups(parts, manifest)
    for number, group in enumerate(groups):
        shards.check_options(number, group)
    check_numbers(parts, [one["options"] for one in manifest.groups])
    names = names_by_path(saved)
    targets = Targets(shards, groups)
    for path, param, target in targets.named(parts.params, names):
        if param.numel():
            target.check(path, names[path])
    check_known(parts, groups, "the checkpoint")
    source = SavedState(folder, saved, names)
    check_tensors(parts, targets, source)
    check_bytes(folder, manifest.shards[parts.rank :: parts.process_group.size()])
    return Loading(groups, source)


def _read(parts: OptimizerParts, loading: Loading) -> list[str]:
    shards, names = parts.known_shards, loading.source.names
    with numbers_taken(parts, loading.groups, names):
        shards.remake(loading.groups, names)
        for group, new in zip(parts.groups, loading.groups, strict=True):
            group.update(options_of(new))
        read_state(parts, loading.source)
    every = Targets(shards, parts.groups).named(parts.params, names)
    return [path for path, param, target in every if gets_digits(names[path], target, param)]


def _check_parameters(parts: OptimizerParts, manifest: Manifest) -> None:
    """Check that paths and shapes are the same.

    Raises:
        ValueError: names those that only one side has, or the first of another shape.
    """
    theirs = manifest.parameters
    missing = [path for path in parts.params if path not in theirs]
    extra = [path for path in theirs if path not in parts.params]
    if missing or extra:
        told = [f"it lacks {some(missing)}"] if missing else []
        told += [f"it has {some(extra)}, which this optimizer has not"] if extra else []
        raise ValueError(
            f"the checkpoint is of other parameters: {'; '.join(told)}. Paths are the names that "
            "the optimizer was given: pass model.named_parameters()"
        )
    for path, param in parts.params.items():
        if tuple(param.shape) != theirs[path]:
            raise ValueError(
                f"{path!r} has shape {theirs[path]} in the checkpoint, here {tuple(param.shape)}"
            )


def _new_groups(parts: OptimizerParts, manifest: Manifest) -> list[dict[str, Any]]:
    """The groups with the options of a checkpoint."""
    ours = _paths_of_groups(parts)
    theirs = [group["params"] for group in manifest.groups]
    if ours != theirs:
        raise ValueError(
            f"the checkpoint has groups of {[len(one) for one in theirs]} parameters, this "
            f"optimizer of {[len(one) for one in ours]}, or others in them; make the same groups"
        )
    found = []
    for number, (group, saved) in enumerate(zip(parts.groups, manifest.groups, strict=True)):
        options = {
            key: tuple(value) if isinstance(group.get(key), tuple) else value
            for key, value in {**saved["options"], **manifest.extra}.items()
        }
        found.append(with_options(parts, number, options, "the checkpoint"))
    return found


def _options_beside(parts: OptimizerParts, number: int) -> dict[str, Any]:
    """Return the options of a state dict that only this group has."""
    return {
        key: value
        for key, value in parts.schema_of(number).options.items()
        if key not in parts.schema.options
    }


def _paths_of_groups(parts: OptimizerParts) -> list[list[str]]:
    """Return the paths of the parameters of each group."""
    paths = {id(param): path for path, param in parts.params.items()}
    return [[paths[id(param)] for param in group["params"]] for group in parts.groups]


def _plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options that JSON has; a schedule is not saved, it counts steps."""
    found: dict[str, Any] = {}
    for key, value in options_of(group).items():
        plain = value.tolist() if isinstance(value, Tensor) else value
        if isinstance(plain, (list, tuple)) and all(isinstance(one, Plain) for one in plain):
            found[key] = list(plain)
        elif isinstance(plain, Plain):
            found[key] = plain
    return found
