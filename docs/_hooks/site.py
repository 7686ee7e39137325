"""Hook of the documentation build: refuse public names that the reference lacks."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads this file alone, not its folder

from public_names import faults


def on_config(config: Any) -> None:
    """Stop the build if the reference and the public names differ.

    Raises:
        PluginError: a public name is not documented, or twice, or a documented one is not public.
    """
    if found := faults():
        raise PluginError("\n".join(found))
