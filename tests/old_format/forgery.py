"""Changes to the files of a folder of the old format, with valid checksums or with none."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

SAVED = Path(__file__).parent / "saved"
MANIFEST = "checkpoint.json"


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def table_path(folder: Path) -> Path:
    """Return the table of the only shard."""
    (found,) = [path for path in folder.glob("*.json") if path.name != MANIFEST]
    return found


def change(folder: Path, change_table: Callable[[dict[str, Any]], Any]) -> None:
    """Change the table of the only shard, and update all checksums, as an attacker can."""
    path = table_path(folder)
    table = read(path)
    change_table(table["tensors"])
    path.write_text(json.dumps(table))
    reseal(folder)


def change_manifest(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    content = read(folder / MANIFEST)
    edit(content)
    (folder / MANIFEST).write_text(json.dumps(with_crc32(content)))


def reseal(folder: Path) -> None:
    """Update the checksums in the manifest to match the files."""

    def enter(content: dict[str, Any]) -> None:
        for shard in content["shards"] if content["version"] > 1 else ():
            for key, ending in (("data", "bin"), ("table", "json")):
                found = (folder / f"{shard['name']}.{ending}").read_bytes()
                shard[key] = [len(found), crc32(found)]

    change_manifest(folder, enter)


def with_crc32(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest of version 2 with its checksum; one of version 1 has none."""
    rest = {key: value for key, value in content.items() if key != "crc32"}
    if rest.get("version") == 1:
        return rest
    return {**rest, "crc32": crc32(json.dumps(rest).encode())}


def as_version_1(folder: Path) -> None:
    """Remove all checksums, since the first version had none."""

    def enter(content: dict[str, Any]) -> None:
        content["version"] = 1
        content["shards"] = [shard["name"] for shard in content["shards"]]

    change_manifest(folder, enter)


@contextmanager
def restored(folder: Path) -> Iterator[None]:
    """Restore the files of a folder after the block."""
    files = {path: path.read_bytes() for path in folder.iterdir()}
    yield
    shutil.rmtree(folder)
    folder.mkdir()
    for path, content in files.items():
        path.write_bytes(content)
