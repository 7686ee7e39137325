"""Test that each cell of the matrix of checkpoints names an existing test."""

import ast
import re
from itertools import product
from pathlib import Path

from tests.choices import case
from tests.distributed_checkpoint.runs import KINDS

from .pages import DOCS

ROOT = DOCS.parent
PAGE = DOCS / "how-to" / "checkpoints-between-everything.md"
HOME = "tests/distributed_checkpoint/test_matrix.py"
CELL = re.compile(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)(\[[^`]+\])?`")


def functions_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_cell_is_a_test() -> None:
    (_, after) = PAGE.read_text("utf-8").split("## From and to")
    lines = after.partition("\n## ")[0].splitlines()
    rows = [line for line in lines if line.startswith("| ")][2:]
    assert len(rows) == len(KINDS) + 2
    pairs = []
    for row in rows:
        for cell in row.strip("| ").split(" | ")[1:]:
            with case(row=row, cell=cell):
                found = CELL.fullmatch(cell.strip())
                if found is None:
                    assert cell.strip() in ("torch's own", "|", "") or cell.startswith("through ")
                    continue
                assert found[2] in functions_of(ROOT / (found[1] or HOME))
                pairs += [found[3]] if found[3] else []
    assert pairs == [f"[{source}-{target}]" for source, target in product(KINDS, KINDS)]
