"""Files of an exported step: a package and its manifest, each put in place in one move."""

import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from functional_optim._torch import aoti_compile_and_package

MANIFEST = "manifest.json"
"""The name of the manifest among the extra files of a package of torch.export."""


def require_place(path: str | os.PathLike[str]) -> Path:
    """A path that a package can be written to, found out before anything is compiled.

    Raises:
        ValueError: it does not end in ``.pt2``.
        OSError: its folder is not there or cannot be written to, or it is a folder itself.
    """
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


def write_package(program: Any, target: Path, manifest: dict[str, Any], package: str) -> None:
    """Write the program and its manifest.

    Args:
        program: what torch.export made.
        target: of the package; the manifest goes beside it, with ``.json`` after its name.
        manifest: as data.
        package: "export" or "aoti".
    """
    text = json.dumps(manifest, indent=1, allow_nan=False)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as folder:
        made, beside = Path(folder) / target.name, Path(folder) / "manifest"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own deprecations, on its way
            if package == "aoti":
                _compile(program, made, text)
            else:
                _save(program, made, text)
        beside.write_text(text + "\n", encoding="utf-8")
        made.replace(target)
        beside.replace(f"{target}.json")


def _save(program: Any, made: Path, text: str) -> None:
    import torch.export  # noqa: PLC0415  slow to import

    torch.export.save(program, made, extra_files={MANIFEST: text})


def _compile(program: Any, made: Path, text: str) -> None:
    aoti_compile_and_package(
        program,
        package_path=str(made),
        inductor_configs={
            "aot_inductor.metadata": {"manifest": text},
            "cpp.dynamic_threads": True,  # as many as the process has that runs it
            # Where one thread compiles, Inductor leaves out what makes a single thread count steps.
            "cpp.threads": max(2, torch.get_num_threads()),
        },
    )
