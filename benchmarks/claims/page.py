"""The page of what was measured, as the command writes it."""

from collections.abc import Sequence

from benchmarks.claims.claims import CLAIMS, NOT_TRIED, SEEDS, Losses
from benchmarks.claims.runs import OUTER, PERIOD, REPLICAS, RUNS, Scale
from benchmarks.markdown import table


def page(losses: Losses, scale: Scale) -> str:
    """Markdown: what was trained, the losses, the verdicts.

    Args:
        losses: of every run, for each seed.
        scale: how much was trained.
    """
    return "\n".join(
        (
            "# Claims of papers, tried in small\n",
            f"{_setting(scale)}\n",
            table(("run", "replicas", "validation loss"), _runs(losses)),
            "A difference of two runs is taken for each seed, between the same first weights and "
            "the same batches. A claim is reproduced if each of its differences is within its "
            "limit in every seed; the limits stood in `benchmarks/claims/claims.py` before "
            "anything was measured.\n",
            table(("claim", "loss less the other's, limit", "measured", "verdict"), _rows(losses)),
            *(f"Not tried: {claim}: {reason}.\n" for claim, reason in NOT_TRIED.items()),
            "Sources:\n",
            "".join(f"- {claim.words}: {claim.source}\n" for claim in CLAIMS),
        )
    )


def told(losses: Losses) -> str:
    """The verdicts, a line each."""
    return "\n".join(f"{claim.verdict(losses)}: {claim.words}" for claim in CLAIMS)


def _setting(scale: Scale) -> str:
    return (
        f"Written by `make claims ARGS=--write`. The demo's transformer with {scale.blocks} block "
        f"of width {scale.width}, on the demo's text: {scale.steps} steps, {scale.batch_size} "
        f"stretches of {scale.context} characters for each replica and step, AdamW within at the "
        f"demo's learning rates, {REPLICAS} replicas unless it says otherwise, stacked in one "
        f"process. DiLoCo, and whatever has an outer rule: SGD every {PERIOD} steps, with lr "
        f"{OUTER.lr} and Nesterov's momentum {OUTER.momentum}. Losses are in nats for each "
        f"character, of the mean of the replicas: the mean over {len(SEEDS)} seeds, least and "
        "greatest. A model of this size says little of large ones."
    )


def _runs(losses: Losses) -> list[list[str]]:
    return [[name, str(run.replicas), _spread(losses[name], "")] for name, run in RUNS.items()]


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
