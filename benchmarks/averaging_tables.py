"""What was measured of averaging, as Markdown."""

from collections.abc import Iterator

from benchmarks import averaging as who
from benchmarks.averaging_targets import farthest_ratio
from benchmarks.markdown import DASH, table
from benchmarks.ratios import short
from benchmarks.records import AveragingSent, Report


def averaging_sections(report: Report) -> Iterator[str]:
    """A section for each thing that was measured."""
    yield from _sent(report)


def _sent(report: Report) -> Iterator[str]:
    if not report.averaging_sent:
        return
    some = report.averaging_sent[0]
    size = who.FLOAT32_BYTES * some.parameters
    yield "## Averaging: what is sent\n"
    yield (
        f"{some.ranks} ranks over gloo, everything through sockets, {size:,} bytes of parameters. "
        f"Counted are the bytes that the kernel says the rank with the most has sent, in whole "
        "periods; what was sent twice because it was lost is left out. By arithmetic, a mean in "
        "float32 over W ranks takes 2 (W - 1) / W times the parameters, and a compressed one takes "
        "the payload W - 1 times, as each rank sends its own to every other. What is counted "
        "beyond that are the headers of messages, two barriers around all of it, and 8 bytes that "
        "each rank sends to each before a mean, so that ranks that brought other tensors are "
        "named.\n"
    )
    each_step = {one.way: max(one.sent_bytes) / one.steps for one in report.averaging_sent}
    rows = [
        [
            one.way,
            f"{each_step[one.way]:,.0f}",
            f"{one.expected_bytes / one.steps:,.0f}",
            f"{farthest_ratio(one):.4f}",
            _times_fewer(each_step, one),
        ]
        for one in report.averaging_sent
    ]
    head = [
        "bytes of a rank in a step",
        "counted",
        "by arithmetic",
        "ratio",
        "times fewer than DDP",
    ]
    yield table(head, rows)


def _times_fewer(each_step: dict[str, float], one: AveragingSent) -> str:
    return short(each_step[who.DDP] / each_step[one.way]) if who.DDP in each_step else DASH
