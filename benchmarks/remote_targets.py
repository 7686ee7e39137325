"""Promises of DistributedOptimizer's speed, and their checks."""

from collections.abc import Iterable, Iterator

from benchmarks import remote as who
from benchmarks.checks import Check, Target, target
from benchmarks.ratios import Spread, spread
from benchmarks.records import Remote, Report

EQUAL = 1.0
ADAMW_TIMES = 1.3
QHM_TIMES = 1.5
KEPT_SHARE = 0.8


def place(one: Remote) -> str:
    """Return the name of a measurement: the rule, the model, and the number of trainers."""
    return f"{one.optimizer}, {one.model}, {counted(one.trainers)}"


def counted(trainers: int) -> str:
    """Format a number of trainers."""
    return f"{trainers} trainer{'s' if trainers > 1 else ''}"


def times_faster(one: Remote, ours: str, theirs: str) -> Spread | None:
    """Return the ratio of steps per second, round by round; None if one contestant has no times."""
    if not (one.seconds.get(ours) and one.seconds.get(theirs)):
        return None
    return spread(one.seconds[theirs], one.seconds[ours])


def kept(one: Remote, name: str) -> Spread | None:
    """Return the share of its speed that a Python thread on the server keeps while all step."""
    return spread(one.alone[name], one.beside[name]) if one.beside.get(name) else None


def remote_targets(report: Report) -> list[Target]:
    """Return every promise with its figures."""
    every = report.remote
    scripted = [one for one in every if who.RULES[one.optimizer].scripted is not None]
    adamw = [one for one in every if one.optimizer == "AdamW" and who.MODELS[one.model].large]
    by_qhm = [one for one in every if one.optimizer == "QHM"]
    failed = [name for name in report.failed if name.startswith(who.TITLE)]
    return [
        target(
            "`DistributedOptimizer` over RPC: never fewer steps per second than torch's in "
            "TorchScript",
            [*failed, *_faster(scripted, who.SCRIPTED, EQUAL)],
        ),
        target(
            f"AdamW on 4 M parameters: at least {ADAMW_TIMES:g} x the steps per second of torch's "
            "`DistributedOptimizer` in TorchScript",
            [*failed, *_faster(adamw, who.SCRIPTED, ADAMW_TIMES)],
        ),
        target(
            f"QHM: at least {QHM_TIMES:g} x the steps per second of torch's "
            "`DistributedOptimizer` in Python",
            [*failed, *_faster(by_qhm, who.PYTHON, QHM_TIMES)],
        ),
        target(
            "an unrelated thread of Python on the server of `DistributedOptimizer` keeps "
            f"{KEPT_SHARE:.0%} of its speed",
            [*failed, *_kept(every)],
        ),
    ]


def _faster(cells: Iterable[Remote], theirs: str, times: float) -> Iterator[Check | str]:
    """Yield checks of our time, as a multiple of the peer's time."""
    for one in cells:
        found = times_faster(one, who.RPC, theirs)
        if found is None:
            yield place(one)
        else:
            yield Check(place(one), 1 / found.median, 1 / times, f"{found} x")


def _kept(cells: Iterable[Remote]) -> Iterator[Check | str]:
    for one in cells:
        found = kept(one, who.RPC)
        if found is None:
            yield place(one)
        else:
            yield Check(place(one), 1 / found.median, 1 / KEPT_SHARE, f"{found} of it")
