"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. A bar within a cell is escaped."""
    lines = [list(head), ["---"] * len(head), *map(list, rows)]
    return "".join(
        "| " + " | ".join(one.replace("|", "\\|") for one in line) + " |\n" for line in lines
    )
