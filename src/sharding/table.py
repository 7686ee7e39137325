"""Report of a plan as a table of text."""

from sharding.optimizer_costs import OptimizerOrFactory
from sharding.ownership import Ownership
from sharding.problem import check_int
from sharding.report import Report, report
from sharding.text import format_bytes, format_flops

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


def table(plan: Ownership, optimizer: OptimizerOrFactory | None, rows: int) -> str:
    """Return the table, after a line that describes the plan."""
    check_int("rows", rows, 1)
    numbers = report(plan, optimizer)
    shown = _choose_ranks(numbers, rows)
    lines = [["rank", *(title for _, title in COLUMNS)]]
    lines += [
        [str(rank), *(_format_cell(name, getattr(numbers, name)[rank]) for name, _ in COLUMNS)]
        for rank in shown
    ]
    lines.append(["max/mean", *(f"{numbers.imbalance(name):.4f}" for name, _ in COLUMNS)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(map(str.rjust, line, widths)) for line in lines]
    text.insert(1, "-" * len(text[0]))
    text.insert(-1, "-" * len(text[0]))
    left_out = len(numbers.elements) - len(shown)
    if left_out:
        text.insert(-2, f"({left_out:,} more ranks, none of them fuller)")
    return "\n".join([_format_heading(plan, numbers), *text, *_format_maxima(numbers)])


def _format_maxima(numbers: Report) -> list[str]:
    """Return a line for each resource: the largest number, over the mean and the lower bound."""
    found = []
    if numbers.makespan:
        found.append(
            f"makespan {format_flops(numbers.makespan)}: {numbers.imbalance('flops'):.4f} of the "
            f"mean, {numbers.makespan_over_bound:.4f} of the lower bound"
        )
    found.append(
        f"memory {format_bytes(numbers.memory)}: {numbers.imbalance():.4f} of the mean, "
        f"{numbers.memory_over_bound:.4f} of the lower bound"
    )
    return found


def _format_heading(plan: Ownership, numbers: Report) -> str:
    ranks = f"{plan.world_size:,} ranks"
    if plan.replicas > 1:
        ranks += f" ({plan.replicas:,} replicas of {plan.shard_ranks:,}; shown is one)"
    text = (
        f"{plan.policy}: {len(plan.specs):,} parameters, {sum(numbers.elements):,} elements, "
        f"{ranks}"
    )
    if plan.replicas > 1:
        most = format_bytes(max(numbers.between_bytes))
        text += f"\nbetween replicas a rank sends up to {most} in a step"
    return text


def _choose_ranks(numbers: Report, rows: int) -> list[int]:
    """Return all ranks, or the first ranks and the fullest rank if there are too many."""
    total = numbers.total_bytes
    if len(total) <= rows:
        return list(range(len(total)))
    fullest = max(range(len(total)), key=total.__getitem__)
    return sorted({fullest, *range(rows - (fullest >= rows))} if rows > 1 else {fullest})


def _format_cell(name: str, count: int) -> str:
    if name.endswith("_bytes"):
        return format_bytes(count)
    return format_flops(count) if name == "flops" else f"{count:,}"
