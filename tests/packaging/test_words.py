"""Test that no two public classes have the same name."""

import ast
from collections import defaultdict
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"

SHARED = {"Transport"}
"""Names that users know from two packages: a transport moves gradients between ranks, or calls to
workers."""


def classes() -> dict[str, list[str]]:
    """Return the files that define each public class name."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted(SRC.rglob("*.py")):
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(file.relative_to(SRC)))
    return found


def test_a_name_is_that_of_one_class() -> None:
    found = classes()
    assert len(found) > 300
    several = {name: files for name, files in found.items() if len(files) > 1}
    assert set(several) == SHARED, several
