"""Hook of the documentation build: refuse public names that the reference lacks; expand nav."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads this file alone, not its folder

from public_names import faults


def on_config(config: Any) -> None:
    """Stop the build if the reference and the public names differ; expand folders in nav.

    Raises:
        PluginError: a public name is not documented, or twice, or a documented one is not public.
    """
    if found := faults():
        raise PluginError("\n".join(found))
    config.nav = expanded(config.nav, Path(config.docs_dir))


def expanded(nav: Any, docs: Path) -> Any:
    """Return a nav in which an entry ``folder/*`` is the list of the pages of a folder.

    Raises:
        PluginError: the folder has no page.
    """
    if isinstance(nav, dict):
        return {title: expanded(entry, docs) for title, entry in nav.items()}
    if isinstance(nav, list):
        return [expanded(entry, docs) for entry in nav]
    if isinstance(nav, str) and nav.endswith("/*"):
        folder = docs / nav.removesuffix("/*")
        found = sorted(path.relative_to(docs).as_posix() for path in folder.glob("*.md"))
        if not found:
            raise PluginError(f"nav has {nav}, and {folder} has no page")
        return found
    return nav
