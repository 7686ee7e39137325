"""Tables in Markdown."""

from collections.abc import Iterable, Sequence

DASH = "—"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, with left-aligned names and right-aligned figures."""
    lines = [list(head), ["---", *["---:"] * (len(head) - 1)], *map(list, rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
