"""Comparison with torch's class for docs/zero.md, computed from the results of the ranks."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.ranks import Outcomes

from .jobs import ONE_HOST, WITHOUT_OVERLAP
from .scenarios import PLAIN, STEP
from .sides import OURS, TORCH

PAGE = Path(__file__).parents[2] / "docs" / "zero.md"
MARKED = re.compile(r"(<!-- zero -->\n)(.*?)(<!-- /zero -->)", flags=re.DOTALL)
Show = Callable[[list[Any]], str]
"""Function from the results of all ranks to the text of a cell."""


class Row(NamedTuple):
    """Line of the table."""

    what: str
    job: str
    show: Show
    torchs: Sequence[str] = (TORCH,)
    ours: Sequence[str] = OURS
    ranks: int = 2


def _each(ranks: list[Any]) -> Any:
    """Return what the first rank saw; assert that all ranks saw the same."""
    assert all(seen == ranks[0] for seen in ranks), ranks
    return ranks[0]


def _then(right: bool) -> str:
    """Return the mark for parameters that are bit for bit those of DDP with torch.optim."""
    return " (=)" if right else ""


def _moved(ranks: list[Any]) -> str:
    seen = _each([one for one in ranks if one is not None])
    return ", ".join(map(str, seen["moved"])) + _then(seen["as plain"])


def _rates(ranks: list[Any]) -> str:
    seen = _each(ranks)
    return ", ".join(map(str, seen["moved at 0"])) + _then(seen["as plain"])


def _error(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _gloo(ranks: list[Any]) -> str:
    text = _each(ranks)
    return _error(text) if text else "taken"


def _groups(ranks: list[Any]) -> str:
    seen = _each(ranks)
    if seen["error"]:
        return f"backward {seen['failed']}: {_error(seen['error'])}"
    return "trained" + _then(seen["as plain"])


def _mixed(ranks: list[Any]) -> str:
    seen = _each(ranks)
    return _error(seen["error"]) if seen["error"] else "trained" + _then(seen["as plain"])


def _saved(ranks: list[Any]) -> str:
    seen = _each(ranks)
    first = _error(seen["at first"]) if seen["at first"] else "possible"
    later = _error(seen["later"]) if seen["later"] else f"state of {seen['entries']} parameters"
    return f"before the first iteration: {first}; after four: {later}"


def _loaded(ranks: list[Any]) -> str:
    seen = _each(ranks)
    first, later = (
        _error(error) if error else "taken" + _then(right)
        for error, right in (seen["at first"], seen["later"])
    )
    return f"before the first iteration: {first}; after four: {later}"


def _kept(ranks: list[Any]) -> str:
    seen = _each(ranks)
    return f"{seen['after']} of {seen['before']}"


def _pickles(ranks: list[Any]) -> str:
    written, read = (sum(seen[key] for seen in ranks) for key in ("written", "read"))
    return f"{written} written, {read} read"


def _number(ranks: list[Any]) -> str:
    return str(_each(ranks))


ROWS = [
    Row("Six iterations under overlap: parameters that each changes", "iterations ", _moved),
    Row("The same with `static_graph=True`", "iterations static_graph", _moved),
    Row(
        "The same with `find_unused_parameters=True`",
        "iterations find_unused_parameters",
        _moved,
    ),
    Row("The same on a group of ranks 0 and 2, of 4", "on_subgroup", _moved, ranks=4),
    Row(
        "The learning rate is set to 0 under overlap: parameters that two iterations change",
        "learning_rates",
        _rates,
    ),
    Row("`consolidate_state_dict` under overlap", "saved_under_overlap", _saved),
    Row("`load_state_dict` under overlap", "loaded_under_overlap", _loaded),
    Row("A hook over gloo", "refused_on_gloo", _gloo),
    Row("Two parameter groups under overlap", "several_groups", _groups),
    Row("Parameters in float32, float64 and bfloat16", "mixed_dtypes", _mixed),
    Row(
        "The caller's dict after `load_state_dict`: states left in it",
        "callers_dict",
        _kept,
        ours=WITHOUT_OVERLAP[1:],
    ),
    Row(
        "Pickles where 4 ranks collect their state on one",
        "pickles",
        _pickles,
        ours=WITHOUT_OVERLAP[1:],
        ranks=4,
    ),
    Row(
        "Broadcasts of 12 parameters in one iteration",
        "broadcasts",
        _number,
        torchs=(STEP, TORCH),
    ),
]
BYTES = (
    "Bytes that 4 ranks send in one iteration, as multiples of DDP's, counted by the kernel; "
    "between hosts, and on one host"
)
NAMES = {STEP: "`step()`", TORCH: "`hook_with_zero_step`", **{one: f"`{one}`" for one in OURS}}


def line(row: Row, outcomes: Outcomes) -> str:
    cells = []
    for sides in (row.torchs, row.ours):
        found = {}
        for side in sides:
            ranks = [outcome.result() for outcome in outcomes[f"{row.job}, {side}"]]
            found[side] = row.show(ranks)
        cells.append(_cell(found))
    return _joined([row.what, *cells])


def bytes_line(outcomes: Outcomes) -> str:
    torchs = {side: f"{ratio(outcomes, side):.2f}" for side in (STEP, TORCH)}
    ours = {
        side: f"{ratio(outcomes, side):.2f}, and {ratio(outcomes, f'{side}, {ONE_HOST}'):.2f}"
        for side in OURS
    }
    return _joined([BYTES, _cell(torchs), _cell(ours)])


def total(outcomes: Outcomes, kind: str) -> float:
    """Return the bytes that all ranks send in one iteration."""
    return float(sum(outcome.result()["sent"] for outcome in outcomes[f"bytes, {kind}"]))


def ratio(outcomes: Outcomes, kind: str) -> float:
    """Return the bytes that all ranks send, as a multiple of those of DDP alone."""
    return total(outcomes, kind) / total(outcomes, PLAIN)


def _cell(found: dict[str, str]) -> str:
    """Return the common text of all sides, or each text with its sides."""
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    by_text: dict[str, list[str]] = {}
    for side, text in found.items():
        by_text.setdefault(text, []).append(NAMES[side])
    return "; ".join(f"{text} ({', '.join(sides)})" for text, sides in by_text.items())


def _joined(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def head() -> str:
    """Return the two header lines."""
    version = ".".join(torch.__version__.split(".")[:2])
    return _joined(["what", f"torch {version}", "functional-optim"]) + "\n| --- | --- | --- |"


def lines(on_two: Outcomes, on_four: Outcomes) -> list[str]:
    """Return all lines; the one about bytes is missing if bytes are not counted."""
    found = [line(row, on_four if row.ranks == 4 else on_two) for row in ROWS]
    if f"bytes, {PLAIN}" in on_four:
        found.append(bytes_line(on_four))
    return found


def in_page() -> str:
    """Return the text between the marks of the page.

    Raises:
        ValueError: the marks are missing, or occur more than once.
    """
    found = MARKED.findall(PAGE.read_text(encoding="utf-8"))
    if len(found) != 1:
        raise ValueError(
            f"{PAGE.name} must hold <!-- zero --> and <!-- /zero --> once, on lines of their "
            f"own; found {len(found)} such places"
        )
    text: str = found[0][1]
    return text


def write(measured: Sequence[str]) -> None:
    """Write the table between the marks of the page."""
    in_page()
    text = "\n".join([head(), *measured]) + "\n"
    whole = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(MARKED.sub(lambda found: found[1] + text + found[3], whole), encoding="utf-8")
