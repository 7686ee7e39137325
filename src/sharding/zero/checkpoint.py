"""Checkpoints: each rank writes its part, and any other number of ranks reads what it needs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from torch import Tensor

from sharding.transport.peers import GroupRank, named
from sharding.zero.agreement import exchanged
from sharding.zero.convert import Targets, gets_digits
from sharding.zero.dcp import Ranges, write
from sharding.zero.files import FORMAT, INDEX, VERSION, index_of, put, tensors_of
from sharding.zero.load import check_known, with_options
from sharding.zero.local import copy_options, options_of
from sharding.zero.parts import Parts
from sharding.zero.read_state import Kept, place_of, read_state
from sharding.zero.shard import Shard
from sharding.zero.stream import Plain


def save(parts: Parts, folder: Path) -> None:
    """Write this rank's part of the state, and with the others, the whole. Collective."""
    trained = [path for path, param in parts.params.items() if param.requires_grad]
    every = Targets(_shard_of(parts), parts.groups).named(parts.params, trained)
    targets = [target for _, _, target in every]
    token = exchanged(parts.process_group, parts.device, uuid4().hex[:8].encode(), 8)[0].decode()
    writers = range(parts.plan.shard_ranks)  # of replicas, the first one writes
    shards = [f"{token}-{rank:05d}" for rank in writers]
    fields = list(dict.fromkeys(field for target in targets for field in target.form.dtypes))
    index = {
        "format": FORMAT,
        "version": VERSION,
        "shards": shards,
        "parameters": {path: list(param.shape) for path, param in parts.params.items()},
        "groups": [
            {"params": _paths(parts, group), "options": _plain_options(group)}
            for group in parts.groups
        ],
        "form": {"counts_steps": parts.form.counts_steps, "eager": parts.form.eager},
        "extra": dict(parts.form.options),
        "stored": any(target.form.stored for target in targets),
        "fields": fields,
    }

    def write_own() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if parts.rank in writers:
            write(_saved_ranges(parts), folder, shards[parts.rank])

    def commit() -> None:
        if parts.rank == 0:
            before = index_of(folder)["shards"] if (folder / INDEX).exists() else []
            put(folder / INDEX, index)
            for shard in before:
                for ending in ("bin", "json"):
                    (folder / f"{shard}.{ending}").unlink(missing_ok=True)

    together(parts, "write its part of the checkpoint", write_own)
    together(parts, "complete the checkpoint", commit)


def load(parts: Parts, folder: Path) -> list[str]:
    """Read this rank's part, whoever wrote it. Collective.

    No rank changes anything before all have found that it fits.

    Returns:
        The parameters that were given digits by their owners, and are to be gathered.
    """
    found: list[Loading] = []
    together(parts, "load the checkpoint", lambda: found.append(_checked(parts, folder)))
    together(parts, "read the checkpoint", lambda: _read(parts, found[0]))
    names = found[0].kept.names
    every = Targets(_shard_of(parts), parts.groups).named(parts.params, names)
    return [path for path, param, target in every if gets_digits(names[path], target, param)]


class Loading(NamedTuple):
    """A checkpoint that fits."""

    groups: list[dict[str, Any]]
    """The parameter groups as they will be."""
    kept: Kept


def together(parts: Parts, what: str, action: Callable[[], None]) -> None:
    """Do something on every rank; if it fails on one, it has failed on all.

    Raises:
        RuntimeError: another rank could not; names it, and says why.
    """
    error: Exception | None = None
    try:
        action()
    except Exception as found:  # noqa: BLE001  raised below, once the others know
        error = found
    text = "" if error is None else f"{type(error).__name__}: {error}"
    texts = exchanged(parts.process_group, parts.device, text.encode())
    if error is not None:
        raise error
    failed = [rank for rank, found in enumerate(texts) if found]
    if failed:
        raise RuntimeError(
            f"{named(parts.process_group, [GroupRank(failed[0])])} could not {what}: "
            f"{texts[failed[0]].decode()}"
        )


def _checked(parts: Parts, folder: Path) -> Loading:
    shard = _shard_of(parts)
    index = index_of(folder)
    saved = tensors_of(folder, index["shards"])
    _check_parameters(parts, index)
    groups = _new_groups(parts, index)
    for number, group in enumerate(groups):
        shard.check_options(number, group)
    names: dict[str, list[str]] = {}
    for key in saved:
        path, _, name = key.rpartition("/")
        names.setdefault(path, []).append(name)
    for path, param, target in Targets(shard, groups).named(parts.params, names):
        if param.numel():
            target.check(path, names[path])
    check_known(parts, groups, "the checkpoint")
    return Loading(groups, Kept(folder, saved, names))


def _read(parts: Parts, loading: Loading) -> None:
    shard = _shard_of(parts)
    shard.remake(loading.groups, loading.kept.names)
    for group, new in zip(parts.groups, loading.groups, strict=True):
        group.update(options_of(new))
    copy_options(parts.groups, parts.optim.param_groups)
    read_state(parts, loading.kept)


def _shard_of(parts: Parts) -> Shard:
    if parts.shard is None:
        raise RuntimeError(
            f"{type(parts.optim).__name__} has no functional equivalent, so its state has no known "
            "form; use consolidate_state_dict and torch.save"
        )
    return parts.shard


def _saved_ranges(parts: Parts) -> dict[str, Ranges]:
    """What this rank writes; a number of a leaf is written by the owner of its first element."""
    state: dict[str, Ranges] = {}
    for piece, entries in parts.pieces():
        for key, tensor in entries.items():
            shape, start = place_of(piece, key, tensor)
            if start == 0 and piece.start > 0:
                continue
            name = f"{piece.path}/{key}"
            known = state[name].parts if name in state else {}
            state[name] = Ranges(shape, {**known, start: tensor.detach().reshape(-1)})
    return state


def _check_parameters(parts: Parts, index: Mapping[str, Any]) -> None:
    """The same paths, each with the same shape.

    Raises:
        ValueError: names those that only one side has, or the first of another shape.
    """
    theirs = index["parameters"]
    missing = [path for path in parts.params if path not in theirs]
    extra = [path for path in theirs if path not in parts.params]
    if missing or extra:
        told = [f"it lacks {_some(missing)}"] if missing else []
        told += [f"it has {_some(extra)}, which this optimizer has not"] if extra else []
        raise ValueError(
            f"the checkpoint is of other parameters: {'; '.join(told)}. Paths are the names that "
            "the optimizer was given: pass model.named_parameters()"
        )
    for path, param in parts.params.items():
        if list(param.shape) != theirs[path]:
            raise ValueError(
                f"{path!r} has shape {tuple(theirs[path])} in the checkpoint, here "
                f"{tuple(param.shape)}"
            )


def _some(paths: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(map(repr, paths[:most]))
    return shown + (f" and {len(paths) - most} more" if len(paths) > most else "")


def _new_groups(parts: Parts, index: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups with the options of a checkpoint."""
    ours = [_paths(parts, group) for group in parts.groups]
    theirs = [group["params"] for group in index["groups"]]
    if ours != theirs:
        raise ValueError(
            f"the checkpoint has groups of {[len(one) for one in theirs]} parameters, this "
            f"optimizer of {[len(one) for one in ours]}, or others in them; make the same groups"
        )
    found = []
    for group, saved in zip(parts.groups, index["groups"], strict=True):
        options = {
            key: tuple(value) if isinstance(group.get(key), tuple) else value
            for key, value in {**saved["options"], **index["extra"]}.items()
        }
        found.append(with_options(parts, group, options, "the checkpoint"))
    return found


def _paths(parts: Parts, group: Mapping[str, Any]) -> list[str]:
    paths = {id(param): path for path, param in parts.params.items()}
    return [paths[id(param)] for param in group["params"]]


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
