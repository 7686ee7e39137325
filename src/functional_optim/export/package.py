"""Files of an exported step: a package and its manifest, each replaced atomically."""

import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

MANIFEST = "manifest.json"
"""The name of the manifest among the extra files of a torch.export package."""


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a package, after a check that it can be written."""
    target = Path(path)
    if target.suffix != ".pt2":
        raise ValueError(f"path must end in .pt2, as torch's loaders want it, got {str(path)!r}")
    if target.is_dir():
        raise IsADirectoryError(f"path must name a file, and {str(target)!r} is a folder")
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"path is to be written in {str(target.parent)!r}, which is not a folder: make it first"
        )
    with tempfile.TemporaryFile(dir=target.parent):
        return target


def write_package(program: Any, target: Path, manifest: dict[str, Any]) -> None:
    """Write the program of torch.export to ``target``, and its manifest to ``<target>.json``."""
    text = json.dumps(manifest, indent=1, allow_nan=False)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as folder:
        made, made_manifest = Path(folder) / target.name, Path(folder) / "manifest"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own deprecations
            torch.export.save(program, made, extra_files={MANIFEST: text})
        made_manifest.write_text(text + "\n", encoding="utf-8")
        made.replace(target)
        made_manifest.replace(f"{target}.json")
