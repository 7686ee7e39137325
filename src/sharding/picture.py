"""A plan's bytes on each rank, as a picture."""

from pathlib import Path

from sharding.ownership import Ownership
from sharding.report import report
from sharding.steppers import Stepper

KINDS = (
    ("parameter_bytes", "parameters", "#1f4e79"),
    ("gradient_bytes", "gradients", "#f4b183"),
    ("state_bytes", "state", "#70ad47"),
)
MIB = 2**20


def draw(plan: Ownership, optimizer: Stepper | None, path: Path) -> None:
    """Write the picture: a step for each rank, its kinds of bytes one above another."""
    from matplotlib.figure import Figure  # noqa: PLC0415  only pictures need it

    numbers = report(plan, optimizer)
    ranks = range(len(numbers.elements))
    # A bar for each rank with a gap behind it, in one patch: there may be thousands.
    edges = [rank + side for rank in ranks for side in (-0.4, 0.4)]
    bottom = [0.0] * len(numbers.elements)
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for name, label, color in KINDS:
        heights = [count / MIB for count in getattr(numbers, name)]
        top = [low + height for low, height in zip(bottom, heights, strict=True)]
        axes.stairs(
            _with_gaps(top), edges, baseline=_with_gaps(bottom), fill=True, label=label, color=color
        )
        bottom = top
    mean = sum(bottom) / len(bottom)
    axes.axhline(mean, color="black", linewidth=1, linestyle="--", label=f"mean, {mean:,.2f} MiB")
    axes.set(
        xlabel="rank" if plan.replicas == 1 else "rank within a replica",
        ylabel="MiB owned",
        title=f"{plan.policy}, {plan.world_size:,} ranks: max/mean {numbers.imbalance():.4f}",
    )
    figure.legend(loc="outside lower center", ncols=len(KINDS) + 1)
    figure.savefig(path, dpi=150)


def _with_gaps(heights: list[float]) -> list[float]:
    """Return the heights of bars and, between each two, that of a gap: 0."""
    return [value for height in heights for value in (height, 0.0)][:-1]
