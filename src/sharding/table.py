"""A plan's report as a table of text."""

from sharding.ownership import Ownership
from sharding.problem import checked_int
from sharding.report import Report, report
from sharding.steppers import Stepper

COLUMNS = (
    ("parameters", "owned"),
    ("elements", "elements"),
    ("parameter_bytes", "parameters"),
    ("gradient_bytes", "gradients"),
    ("state_bytes", "state"),
    ("total_bytes", "all three"),
    ("sent_bytes", "sent/step"),
    ("flops", "FLOP/step"),
)
PREFIXES = ("", "k", "M", "G", "T", "P")
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
    return "\n".join([_head(plan, numbers), *text, *levels(numbers)])


def levels(numbers: Report) -> list[str]:
    """Return a line for each resource: its largest rank, and how far that is from the best."""
    found = []
    if numbers.makespan:
        found.append(
            f"makespan {operations(numbers.makespan)}: {numbers.imbalance('flops'):.4f} of the "
            f"mean, {numbers.makespan_over_bound:.4f} of the lower bound"
        )
    found.append(
        f"memory {size(numbers.memory)}: {numbers.imbalance():.4f} of the mean, "
        f"{numbers.memory_over_bound:.4f} of the lower bound"
    )
    return found


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
    return [_written(name, getattr(numbers, name)[rank]) for name, _ in COLUMNS]


def _written(name: str, count: int) -> str:
    if name.endswith("_bytes"):
        return size(count)
    return operations(count) if name == "flops" else f"{count:,}"


def operations(count: int) -> str:
    """A number of floating-point operations as one reads it."""
    number, unit = float(count), 0
    while number >= 1000 and unit + 1 < len(PREFIXES):
        number, unit = number / 1000, unit + 1
    return f"{count} FLOP" if unit == 0 else f"{number:.2f} {PREFIXES[unit]}FLOP"


def size(count: int) -> str:
    """A number of bytes as one reads it."""
    number, unit = float(count), 0
    while number >= 1000 and unit + 1 < len(UNITS):
        number, unit = number / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{number:.2f} {UNITS[unit]}"
