"""Hooks of the documentation build: refuse undocumented public names, add the notebooks."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads this file alone, not its folder

from public_names import ROOT, faults

NOTEBOOKS = ROOT / "notebooks"


def on_config(config: MkDocsConfig, **_: Any) -> None:
    """Stop the build if the reference and the public names differ.

    Raises:
        PluginError: a public name is not documented, or twice, or a documented one is not public.
    """
    if found := faults():
        raise PluginError("\n".join(found))


@event_priority(100)  # before mkdocs-jupyter, which looks for notebooks among the files
def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add every notebook of ``notebooks/`` as a page of ``tutorials/``."""
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        page = f"tutorials/{notebook.name}"
        if files.get_file_from_path(page) is None:
            file = File.generated(config, page, abs_src_path=str(notebook))
            files.append(file)
    return files
