"""A plan's report as a table of text."""

from sharding.footprint import Stepper
from sharding.ownership import Ownership
from sharding.problem import checked_int
from sharding.report import Report, report

COLUMNS = (
    ("parameters", "owned"),
    ("elements", "elements"),
    ("parameter_bytes", "parameters"),
    ("gradient_bytes", "gradients"),
    ("state_bytes", "state"),
    ("total_bytes", "all three"),
    ("sent_bytes", "sent/step"),
)
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def table(plan: Ownership, optimizer: Stepper | None, rows: int) -> str:
    """The table, with a line of what the plan is above it."""
    checked_int("rows", rows, 1)
    numbers = report(plan, optimizer)
    shown = _shown(numbers, rows)
    lines = [["rank", *(title for _, title in COLUMNS)]]
    lines += [[str(rank), *_cells(numbers, rank)] for rank in shown]
    lines.append(["max/mean", *(f"{numbers.imbalance(name):.4f}" for name, _ in COLUMNS)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(map(str.rjust, line, widths)) for line in lines]
    text.insert(1, "-" * len(text[0]))
    text.insert(-1, "-" * len(text[0]))
    left_out = len(numbers.elements) - len(shown)
    if left_out:
        text.insert(-2, f"({left_out:,} more ranks, none of them fuller)")
    return "\n".join([_head(plan, numbers), *text])


def _head(plan: Ownership, numbers: Report) -> str:
    ranks = f"{plan.world_size:,} ranks"
    if plan.replicas > 1:
        ranks += f" ({plan.replicas:,} replicas of {plan.shard_ranks:,}; shown is one)"
    text = (
        f"{plan.policy}: {len(plan.specs):,} parameters, {sum(numbers.elements):,} elements, "
        f"{ranks}"
    )
    if plan.replicas > 1:
        most = size(max(numbers.between_bytes))
        text += f"\nbetween replicas a rank sends up to {most} in a step"
    return text


def _shown(numbers: Report, rows: int) -> list[int]:
    """The first ranks, and the fullest one, where there is no room for all."""
    total = numbers.total_bytes
    if len(total) <= rows:
        return list(range(len(total)))
    fullest = max(range(len(total)), key=total.__getitem__)
    return sorted({fullest, *range(rows - (fullest >= rows))} if rows > 1 else {fullest})


def _cells(numbers: Report, rank: int) -> list[str]:
    return [
        size(getattr(numbers, name)[rank])
        if name.endswith("_bytes")
        else f"{getattr(numbers, name)[rank]:,}"
        for name, _ in COLUMNS
    ]


def size(count: int) -> str:
    """A number of bytes as one reads it."""
    number, unit = float(count), 0
    while number >= 1000 and unit + 1 < len(UNITS):
        number, unit = number / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{number:.2f} {UNITS[unit]}"
