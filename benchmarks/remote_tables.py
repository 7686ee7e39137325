"""Results of DistributedOptimizer, as Markdown."""

from collections.abc import Iterator
from statistics import median

from benchmarks import remote as who
from benchmarks.markdown import DASH, table
from benchmarks.ratios import Spread
from benchmarks.records import Remote, Report
from benchmarks.remote_targets import kept, place, times_faster


def remote_sections(report: Report) -> Iterator[str]:
    """Yield a section if there are results."""
    if not report.remote:
        return
    yield "## DistributedOptimizer: trainers that step one server\n"
    yield (
        "Parameters live in a process of their own, the server. In another one, threads step them "
        "at once through one optimizer, each by the gradients of its own distributed autograd "
        "context; a step does no pass. Every figure is one of steps per second, of all trainers "
        "together: more than 1 is faster. torch's `DistributedOptimizer` steps classes that have a "
        "functional form in TorchScript, several at once and without a lock on what they write, "
        "and all others in Python, one after the other, as ours does with every step. Its way in "
        "Python is taken with subclasses that have no functional form, and QHM has none. Over "
        "threads the server is a thread of the trainers' process, and no message is sent: that is "
        "shown beside the rest, not judged.\n"
    )
    head = [
        "steps per second",
        f"{who.RPC}, itself",
        f"{who.RPC} / {who.SCRIPTED}",
        f"{who.RPC} / {who.PYTHON}",
        f"{who.THREADS} / {who.SCRIPTED}",
        f"{who.THREADS} / {who.PYTHON}",
    ]
    yield table(head, [_row(one) for one in report.remote])
    yield "## DistributedOptimizer: what else the server does meanwhile\n"
    yield (
        "What a thread of Python on the server, which has nothing to do with the steps, keeps of "
        "its speed while all trainers step: its time alone over its time beside them. The cores "
        "are shared with the trainers; over threads, so is Python. Another step of torch's in "
        "TorchScript takes another core, where there is one.\n"
    )
    rows = [[place(one), *(_shown(kept(one, name)) for name in who.NAMES)] for one in report.remote]
    yield table(["", *who.NAMES], rows)


def remote_failures(report: Report) -> dict[str, str]:
    """Return why contestants did not run, by name."""
    return {
        f"{who.TITLE}{place(one)}: {name}": why
        for one in report.remote
        for name, why in one.failed.items()
    }


def _row(one: Remote) -> list[str]:
    own = one.seconds.get(who.RPC)
    pairs = [(a, b) for a in (who.RPC, who.THREADS) for b in (who.SCRIPTED, who.PYTHON)]
    return [
        place(one),
        f"{1 / median(own):,.0f}" if own else DASH,
        *(_shown(times_faster(one, *pair)) for pair in pairs),
    ]


def _shown(found: Spread | None) -> str:
    return DASH if found is None else str(found)
