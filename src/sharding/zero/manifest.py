"""``checkpoint.json``: what a checkpoint consists of. Nothing in it is believed unchecked.

Version 2 names, for each shard, the size and CRC-32 of its two files, and has a CRC-32 of itself.
Version 1 had no checksums; it is read too, and its sizes and tables are checked as those of
version 2 are.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from functional_optim.frontends.recipe import StateDictForm
from sharding.zero.disk import opened
from sharding.zero.stream import Plain

MANIFEST = "checkpoint.json"
PART = "checkpoint.part"
"""The name under which a manifest is written, before it is put in place."""
FORMAT = "sharding state"
VERSION = 2
SHARD = r"[0-9a-f]{8}-[0-9]{5,7}"
"""What the name of a shard is: a token of one save, and a rank."""
SHARD_NAME = re.compile(SHARD)
LEFTOVER = re.compile(rf"(?P<shard>{SHARD})\.(?:bin|json|part)|{re.escape(PART)}")
"""The names of the files of any save, complete or not."""
LARGEST = 1 << 63


class Checksum(NamedTuple):
    """Expected size and checksum of a file."""

    size: int
    """In bytes."""
    crc32: int


class ShardRecord(NamedTuple):
    """Files of one rank."""

    name: str
    data: Checksum | None
    """Of the ``.bin``; None in a checkpoint of version 1."""
    table: Checksum | None
    """Of the ``.json``."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as the manifest has it."""
        assert self.data is not None
        assert self.table is not None
        return {"name": self.name, "data": list(self.data), "table": list(self.table)}


def record_of(content: Mapping[str, Any]) -> ShardRecord:
    """The inverse of :meth:`ShardRecord.to_json`."""
    return ShardRecord(content["name"], Checksum(*content["data"]), Checksum(*content["table"]))


class Manifest(NamedTuple):
    """A checkpoint: what :func:`manifest_of` has found to be in order."""

    shards: tuple[ShardRecord, ...]
    parameters: Mapping[str, tuple[int, ...]]
    """The shape of each parameter, by its path."""
    groups: Sequence[Mapping[str, Any]]
    """The paths ("params") and options ("options") of each parameter group."""
    schema: StateDictForm
    """How torch.optim writes this state."""
    extra: Mapping[str, Any]
    """Options that the class writes into every group."""
    stored: bool
    """Whether state is kept in other storages."""
    fields: Sequence[str]
    """The names of the plain fields of state."""
    starts_late: Sequence[str]
    """The paths of parameters all of whose state torch makes in the first step."""


def content_of(manifest: Manifest) -> dict[str, Any]:
    """Return what a manifest says, except for its shards, as :func:`sealed` takes it."""
    form = manifest.schema
    return {
        "parameters": {path: list(shape) for path, shape in manifest.parameters.items()},
        "groups": list(manifest.groups),
        "form": {"counts_steps": form.counts_steps, "eager": form.eager},
        "extra": dict(manifest.extra),
        "stored": manifest.stored,
        "fields": list(manifest.fields),
        "starts_late": list(manifest.starts_late),
    }


def sealed(content: Mapping[str, Any]) -> bytes:
    """A manifest as text, with its format, version and checksum."""
    whole = {"format": FORMAT, "version": VERSION, **content}
    return json.dumps({**whole, "crc32": _crc32_of(whole)}).encode()


def _crc32_of(content: Mapping[str, Any]) -> int:
    return crc32(json.dumps({k: v for k, v in content.items() if k != "crc32"}).encode())


def manifest_of(folder: Path) -> Manifest:
    """The manifest of the checkpoint in a folder.

    Raises:
        FileNotFoundError: no checkpoint was completed there.
        ValueError: it was damaged, or something else made it.
    """
    path = folder / MANIFEST
    try:
        with opened(path) as file:
            text = file.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"{folder} has no {MANIFEST}, so no checkpoint was completed there; save() writes one"
        ) from error
    content = parsed(text, path)
    version = content.get("version")
    if content.get("format") != FORMAT or type(version) is not int or version not in (1, VERSION):
        raise ValueError(
            f"{path} has format {content.get('format')!r}, version {version!r}; {FORMAT!r}, "
            f"versions 1 and {VERSION}, is read here"
        )
    if version == VERSION and content.get("crc32") != _crc32_of(content):
        raise ValueError(f"{path} does not have the checksum that it names; it was damaged")
    return _Checks(path).manifest(content, version)


def parsed(text: bytes, path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: it is none.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON that can be read; it was damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def is_count(value: Any) -> bool:
    """Return True if a value is a number of elements or bytes, or a place among them."""
    return type(value) is int and 0 <= value < LARGEST


def is_shape(value: Any) -> bool:
    """Return True if a value is a shape."""
    return isinstance(value, list) and all(map(is_count, value))


def _is_option(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(one, Plain) for one in value)
    return isinstance(value, Plain)


class _Checks:
    """Each part of a manifest is what it must be, or an error says which is not."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def manifest(self, content: Mapping[str, Any], version: int) -> Manifest:
        parameters = self._get(content, "parameters", dict)
        for path, shape in parameters.items():
            self._require(is_shape(shape), f"shapes of parameters, got {shape!r} for {path!r}")
        groups = self._groups(self._get(content, "groups", list), parameters)
        form = self._get(content, "form", dict)
        known = form.keys() <= {"counts_steps", "eager"}
        self._require(known and all(type(one) is bool for one in form.values()), "a form of bools")
        fields = self._get(content, "fields", list)
        # The first manifests did not say it.
        late = self._get({"starts_late": [], **content}, "starts_late", list)
        for names, what in ((fields, "fields"), (late, "parameters that start late")):
            self._require(all(isinstance(one, str) for one in names), f"{what} by their names")
        return Manifest(
            self._shards(self._get(content, "shards", list), version),
            {path: tuple(shape) for path, shape in parameters.items()},
            groups,
            StateDictForm(form.get("counts_steps", True), form.get("eager", True)),
            self._options(self._get(content, "extra", dict)),
            # The first manifests were written before there were storages.
            self._get({"stored": False, **content}, "stored", bool),
            fields,
            late,
        )

    def _shards(self, shards: list[Any], version: int) -> tuple[ShardRecord, ...]:
        found = [self._shard(one, version) for one in shards]
        names = [one.name for one in found]
        self._require(len(set(names)) == len(names), "every shard once")
        return tuple(found)

    def _shard(self, one: Any, version: int) -> ShardRecord:
        checked = version > 1
        if checked:
            self._require(isinstance(one, dict), f"shards as objects, got {one!r}")
        name = one.get("name") if checked else one
        named = isinstance(name, str) and SHARD_NAME.fullmatch(name)
        self._require(bool(named), f"shards with names such as 0a1b2c3d-00000, got {name!r}")
        sums = (
            [self._checksum(one.get(key)) for key in ("data", "table")] if checked else [None] * 2
        )
        return ShardRecord(name, *sums)

    def _checksum(self, value: Any) -> Checksum:
        right = isinstance(value, list) and len(value) == 2 and all(map(is_count, value))
        self._require(right, f"a size and a CRC-32 of each file, got {value!r}")
        return Checksum(*value)

    def _groups(self, groups: list[Any], parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        found = []
        left = set(parameters)
        for group in groups:
            self._require(isinstance(group, dict), f"groups as objects, got {group!r}")
            for path in self._get(group, "params", list):
                self._require(
                    isinstance(path, str) and path in left,
                    f"every one of its parameters in one group, once; got {path!r}",
                )
                left.remove(path)
            options = self._options(self._get(group, "options", dict))
            found.append({"params": group["params"], "options": options})
        self._require(not left, f"every one of its parameters in a group; {left or ''} is in none")
        return found

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        for key, value in options.items():
            plain = key not in {"params", "param_names"} and _is_option(value)
            self._require(plain, f"options of plain values, got {key}={value!r}")
        return options

    def _get(self, content: Mapping[str, Any], key: str, kind: type) -> Any:
        value = content.get(key)
        self._require(type(value) is kind, f"{key!r} as {kind.__name__}, got {value!r}")
        return value

    def _require(self, right: bool, what: str) -> None:
        if not right:
            what = what if len(what) < 500 else f"{what[:500]} ..."
            raise ValueError(
                f"{self._path} must have {what}; it was damaged, or is of another kind"
            )
