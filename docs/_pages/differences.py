"""The table of differences in docs/agreement.md, from the results that are stored beside it."""

import json
import re
from pathlib import Path
from typing import Any

from docs._pages import markdown

DOCS = Path(__file__).parents[1]
PAGE = DOCS / "agreement.md"
DATA = DOCS / "_data" / "agreement.json"
MARKS = re.compile(r"<!-- differences -->\n(.*?)<!-- /differences -->", flags=re.DOTALL)

ROUNDING = {"torch.float64": 1e-10, "torch.float32": 1e-3, "torch.bfloat16": 0.05}
"""Largest difference that counts as rounding, relative to how far a tensor has moved."""

HEAD = ["algorithm", "other implementation"]


def stored() -> dict[str, Any]:
    """Return the results of the last ``make agreement``."""
    found: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def is_rounding(distances: dict[str, Any], coarsest: str | None = None) -> bool:
    """Return True if all differences are those of rounding."""
    for dtype, values in distances.items():
        if isinstance(values, str):
            continue
        limit = max(ROUNDING[dtype], ROUNDING.get(f"torch.{coarsest}", 0.0))
        if not all(one <= limit for one in values):
            return False
    return True


def unexplained(results: dict[str, Any]) -> list[str]:
    """Return one sentence for each difference without a cause that its experiment shows."""
    found = []
    for key, row in results["rows"].items():
        coarsest = row.get("coarsest")
        if "cause" in row and not is_rounding(row["without"], coarsest):
            found.append(f"{key}: the experiment leaves {_numbers(row['without'])}")
        elif all(isinstance(one, str) for one in row["differences"].values()):
            found.append(f"{key}: it does not run: {_numbers(row['differences'])}")
        elif "cause" not in row and not is_rounding(row["differences"], coarsest):
            found.append(f"{key}: {_numbers(row['differences'])}")
        elif "cause" in row and is_rounding(row["differences"], coarsest):
            found.append(f"{key}: there is a cause, and no difference")
    return found


def table(results: dict[str, Any], algorithm: str | None = None) -> str:
    """Return the table of all rows, or of one algorithm."""
    steps = " / ".join(map(str, results["steps"]))
    head = [*HEAD, f"float64, after {steps} steps", f"float32, after {steps}", "cause"]
    if algorithm is not None:
        head = head[1:]
    lines = []
    for row in results["rows"].values():
        if algorithm in (None, row["algorithm"]):
            cells = [f"`{row['algorithm']}`", f"`{row['other']}`", *_cells(row)]
            lines.append(cells if algorithm is None else cells[1:])
    return markdown.table(head, lines)


def text(results: dict[str, Any]) -> str:
    """Return the generated part of the page."""
    versions = ", ".join(f"{name} {one}" for name, one in results["versions"].items())
    parts = [table(results), f"Versions: {versions}.\n"]
    if results["comparisons"]:
        rows = [[f"`{name}`", _short(one)] for name, one in results["comparisons"].items()]
        shown = markdown.table(["comparison", "largest relative difference"], rows)
        words = "The modules `oracle_FAMILY` of tests/agreement compare further options:"
        parts.append(f"{words}\n\n{shown}")
    return "\n".join(parts)


def write(results: dict[str, Any]) -> None:
    """Write the generated part into the page."""
    made = f"<!-- differences -->\n{text(results)}<!-- /differences -->"
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(MARKS.sub(lambda _: made, page), encoding="utf-8")


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [_shown(one) for one in row["differences"].values()]
    if "cause" in row:
        rest = max(one for one in row["without"]["torch.float64"])
        cells.append(f"{row['cause']} Without this difference: {_short(rest)}.")
    else:
        cells.append(f"computes in {row['coarsest']}" if "coarsest" in row else "")
    return cells


def _shown(values: list[float] | str) -> str:
    return values if isinstance(values, str) else " / ".join(map(_short, values))


def _short(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return "0" if value == 0 else f"{value:.0e}"


def _numbers(distances: dict[str, Any]) -> str:
    return "; ".join(_shown(one) for one in distances.values())
