"""Code blocks of the pages under ``docs``.

A comment in the line before a block says how it differs from a block that always runs here:

- ``<!-- not run: REASON -->``: the block does not run.
- ``<!-- needs: MODULE, MODULE -->``: the block runs if these modules are installed.
- ``<!-- torchrun: N -->``: the block is a script, and runs on N processes.
"""

import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[2] / "docs"

_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>not run|needs|torchrun): (?P<value>.+?) -->\n)?"
    r"(?P<fence>```+)python[^\n]*\n(?P<code>.*?)^(?P=fence)",
    flags=re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    code: str
    line: int
    """The number of lines of the page before the code."""
    mark: str
    """Kind of mark: "", "not run", "needs" or "torchrun"."""
    value: str
    """Text of the mark."""

    @property
    def is_run_here(self) -> bool:
        """Return True if the block runs in the process of the test."""
        if self.mark == "needs":
            return all(map(is_installed, self.value.split(", ")))
        return self.mark == ""


def is_installed(module: str) -> bool:
    """Return True if a module can be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def blocks_of(page: Path) -> list[Block]:
    """Return the Python blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            found["code"],
            text.count("\n", 0, found.start("code")),
            found["mark"] or "",
            (found["value"] or "").strip(),
        )
        for found in _BLOCK.finditer(text)
    ]


def pages() -> dict[str, Path]:
    """Return the pages that have Python blocks, by their path under ``docs``."""
    every = sorted(DOCS.rglob("*.md"))
    return {page.relative_to(DOCS).as_posix(): page for page in every if blocks_of(page)}


def script_of(blocks: list[Block]) -> str:
    """Return the blocks that run here as one script, with each line where the page has it."""
    lines: list[str] = []
    for block in blocks:
        if block.is_run_here:
            lines += [""] * (block.line - len(lines))
            lines += block.code.splitlines()
    return "\n".join(lines) + "\n"
