"""The page of what was measured, as the command writes it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.claims.claims import CLAIMS, NOT_TRIED, SEEDS, Losses
from benchmarks.claims.runs import OUTER, PERIOD, RATES, REPLICAS, RUNS, Scale
from benchmarks.markdown import table


class Measured(NamedTuple):
    """What was measured, by the names of runs."""

    losses: Losses
    """Of each seed."""
    rates: Mapping[str, float]
    """Learning rate that was taken, in multiples of the demo's."""


_HOW = """A difference of two runs is taken for each seed, between the same first weights and the \
same batches. A claim is reproduced if each of its differences is within its limit in every seed; \
the limits stood in `benchmarks/claims/claims.py` before anything was measured.
"""


def page(found: Measured, scale: Scale) -> str:
    """Markdown: what was trained, the losses, the verdicts.

    Args:
        found: of every run.
        scale: how much was trained.
    """
    head = ("claim", "loss less the other's, limit", "measured", "verdict")
    parts = [
        "# Claims of papers, tried in small\n",
        _setting(scale),
        table(("run", "replicas", "rate", "validation loss"), _runs(found)),
        _HOW,
        table(head, _rows(found.losses)),
    ]
    parts += [f"Not tried: {claim}: {reason}.\n" for claim, reason in NOT_TRIED.items()]
    sources = "".join(f"- {claim.words}: {claim.source}\n" for claim in CLAIMS)
    return "\n".join([*parts, "Sources:\n", sources])


def told(losses: Losses) -> str:
    """The verdicts, a line each."""
    return "\n".join(f"{claim.verdict(losses)}: {claim.words}" for claim in CLAIMS)


def _setting(scale: Scale) -> str:
    rates = ", ".join(f"{rate:g}" for rate in RATES)
    return f"""\
Written by `make claims ARGS=--write`. The demo's transformer with {scale.blocks} block of width \
{scale.width}, on the demo's text: {scale.steps} steps, {scale.batch_size} stretches of \
{scale.context} characters for each replica and step, AdamW within, {REPLICAS} replicas that are \
stacked in one process, or 1. DiLoCo, and whatever has an outer rule: SGD every {PERIOD} steps, \
with lr {OUTER.lr} and Nesterov's momentum {OUTER.momentum}. Losses are in nats for each \
character, of the mean of the replicas: the mean over {len(SEEDS)} seeds, least and greatest. The \
learning rate within is the demo's, times the best of {rates} in a seed that is not judged: an \
outer momentum makes steps longer, and would be ahead where rates are too small for what has none. \
A model of this size says little of large ones.
"""


def _runs(found: Measured) -> list[list[str]]:
    return [
        [name, str(run.replicas), f"{found.rates[name]:g}", _spread(found.losses[name], "")]
        for name, run in RUNS.items()
    ]


def _rows(losses: Losses) -> list[list[str]]:
    rows = []
    for claim in CLAIMS:
        words, verdict = claim.words, f"**{claim.verdict(losses)}**"
        for one in claim.differences:
            limit = f"{one.run}, less {one.other}: at most {one.at_most:+.2f}"
            rows.append([words, limit, _spread(one.measured(losses), "+"), verdict])
            words = verdict = ""
    return rows


def _spread(values: Sequence[float], sign: str) -> str:
    """Mean, least and greatest."""
    mean, least, most = (
        format(value, f"{sign}.3f")
        for value in (sum(values) / len(values), min(values), max(values))
    )
    return f"{mean} ({least} to {most})"
