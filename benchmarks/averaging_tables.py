"""Results of averaging, as Markdown."""

from collections.abc import Iterator

from benchmarks import averaging as who
from benchmarks import averaging_race as race
from benchmarks.averaging_targets import farthest_ratio
from benchmarks.markdown import DASH, table
from benchmarks.ratios import short
from benchmarks.records import AveragingSent, Report


def averaging_sections(report: Report) -> Iterator[str]:
    """Yield a section for each measurement."""
    yield from _sent(report)
    yield from _races(report)


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
        "times fewer than DDP's",
    ]
    yield table(head, rows)


def _times_fewer(each_step: dict[str, float], one: AveragingSent) -> str:
    return short(each_step[who.DDP] / each_step[one.way]) if who.DDP in each_step else DASH


def _races(report: Report) -> Iterator[str]:
    if not report.averaging_races:
        return
    some = report.averaging_races[0]
    late = f"delayed by {some.delay_milliseconds:g} ms"
    if some.no_delay:
        late = f"not delayed, as this kernel cannot (`{some.no_delay}`)"
    yield "## Averaging: training over a slow link\n"
    yield (
        f"The demo's transformer ({some.parameters:,} parameters) and text, {some.ranks} ranks in "
        "network namespaces of their own on one machine, joined by a bridge: each link passes "
        f"{some.megabits:g} Mbit/s in each direction and is {late}. Between two ranks, messages "
        f"found {some.found_megabits:.0f} Mbit/s and a round trip of "
        f"{some.round_trip_milliseconds:.2g} ms. All train for {some.seconds:g} s, in turns, by "
        f"AdamW at the same constant rate; in the first {race.WARMUP} steps gradients are averaged "
        "by all. The loss is that of the parameters of rank 0 on validation text, in nats per "
        "character, after the last mean before the time was over (under streaming, whose means "
        "are mixed in later, after the last step in which something was sent). One run with one "
        "seed: small differences say nothing.\n"
    )
    samples = {one.way: one.samples for one in report.averaging_races}
    rows = [
        [
            one.way,
            f"{one.samples / one.seconds:,.0f}",
            short(one.samples / samples[who.DDP]) if samples.get(who.DDP) else DASH,
            f"{one.curve[-1][1]:.3f}",
            f"{one.curve[-1][0]:.1f} s",
        ]
        for one in report.averaging_races
    ]
    head = ["", "samples per second", "times DDP's", "validation loss", "taken after"]
    yield table(head, rows)
