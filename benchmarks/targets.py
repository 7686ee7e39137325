"""Promises of speed, and their checks."""

from collections.abc import Iterable, Iterator
from statistics import median

from benchmarks import contestants as who
from benchmarks import convergence, memory, ready
from benchmarks.averaging_targets import averaging_targets
from benchmarks.checks import Check, Target, target
from benchmarks.distances import SPREADS, TOLERANCE, allowed, distance
from benchmarks.ratios import against_best, ratio, short, spread
from benchmarks.records import Cell, Memory, Report
from benchmarks.remote_targets import remote_targets
from benchmarks.sharded_targets import sharded_targets
from benchmarks.workloads import SMALL_1, SMALL_10, WORKLOADS

FLOOR_LIMIT = 1.10
PEER_LIMIT = 1.00
MANY_FLAT_LIMIT = 0.10
MANY_SEPARATE_LIMIT = 0.15
BLOCKED_LIMIT = 3.2
OVERHEAD_LIMIT = 0.7
FIRST_LIMIT_SECONDS = 0.6
READY_LIMIT_SECONDS = 0.05
SMALL_LIMIT_MICROSECONDS = 8.0
UNRELATED_WAY, UNRELATED_SHARE = "compiled", 0.8
MEMORY_SHARE = 0.01
MEMORY_BYTES = 64 * 2**20


def _cells(report: Report) -> list[Cell]:
    return [cell for cell in report.cells if cell.device == "cpu"]


def _place(cell: Cell) -> str:
    return f"{cell.optimizer}, {cell.workload}"


def _pairs(
    cells: Iterable[Cell], pairs: Iterable[tuple[str, str]], limit: float
) -> Iterator[Check | str]:
    """Yield a check for each cell and pair, unless one contestant of the pair does not exist."""
    for cell in cells:
        for ours, theirs in pairs:
            if ours in cell.absent or theirs in cell.absent:
                continue
            place = f"{_place(cell)}: {ours} / {theirs}"
            found = ratio(cell, ours, theirs)
            if found is not None:
                yield Check(place, found.median, limit, str(found))
            elif ours in cell.failed or theirs in cell.failed:
                yield place


def _against_peers(
    cells: Iterable[Cell], ours: str, peers: tuple[str, ...], limit: float
) -> Iterator[Check | str]:
    for cell in cells:
        yield from (f"{_place(cell)}: {one}" for one in (ours, *peers) if one in cell.failed)
        found = against_best(cell, ours, peers)
        if found is not None:
            place = f"{_place(cell)}: {ours} / {found.peer}"
            yield Check(place, found.ratio.median, limit, str(found.ratio))


def _failed(report: Report, kind: str) -> Iterator[str]:
    return (name for name in report.failed if name.startswith(kind))


def _memory(report: Report) -> Iterator[Check | str]:
    yield from _failed(report, "memory,")
    for one in report.memory:
        if one.way in memory.PEERS:
            continue
        limit = MEMORY_SHARE * one.parameter_bytes + MEMORY_BYTES
        place = f"{one.optimizer}, {one.workload}: {one.way}"
        yield place if one.failed else Check(place, one.extra_bytes, limit, shown_extra(one))


def shown_extra(one: Memory) -> str:
    """Return the extra memory, in bytes and as a share of the parameters."""
    if one.failed:
        return "failed"
    share = 100 * one.extra_bytes / one.parameter_bytes
    return f"{one.extra_bytes / 2**20:,.1f} MiB ({short(share)} %)"


def _unrelated(report: Report) -> Iterator[Check | str]:
    """Yield checks of how much a step slows down a Python thread that runs beside it."""
    yield from _failed(report, f"two threads: {UNRELATED_WAY}")
    for one in report.two_threads:
        if one.way == UNRELATED_WAY and one.beside:
            found = spread(one.beside, one.alone)
            yield Check(one.way, found.median, 1 / UNRELATED_SHARE, str(found))


def _ready(report: Report) -> Iterator[Check | str]:
    way = ready.WAYS[0]
    yield from _failed(report, f"ready: {way},")
    for one in report.ready:
        if one.way == way and one.warm:
            value = median(one.warm)
            yield Check("empty cache", one.cold, FIRST_LIMIT_SECONDS, f"{one.cold:.2f} s")
            yield Check("second process", value, READY_LIMIT_SECONDS, f"{value:.3f} s")


def _small(cells: Iterable[Cell]) -> Iterator[Check | str]:
    """Yield checks of the time for a step of one small parameter, in microseconds."""
    for cell in cells:
        if who.AUTO in cell.failed:
            yield _place(cell)
            continue
        found = [one for heat in cell.heats for one in heat.seconds.get(who.AUTO, [])]
        if found:
            value = 1e6 * median(found)
            place = f"{_place(cell)}: {who.AUTO}"
            yield Check(place, value, SMALL_LIMIT_MICROSECONDS, f"{value:.1f} us")


def learning(report: Report) -> Iterator[Check | str]:
    """Yield a check of each storage's loss against float32's, except rounding to nearest."""
    left_out = convergence.TITLE + convergence.NEAREST
    yield from (name for name in _failed(report, convergence.TITLE) if name != left_out)
    limit = allowed(report)
    for one in report.convergence:
        if one.name not in convergence.JUDGED:
            continue
        place, found = convergence.TITLE + one.name, distance(report, one.name)
        if limit is None or found is None:
            yield place
        else:
            shown = f"{found:+.3f}, at most {limit:.3f} either way,"
            yield Check(place, abs(found), limit, shown)


def targets(report: Report) -> list[Target]:
    """Return every promise with its figures."""
    cells = _cells(report)
    large = [cell for cell in cells if WORKLOADS[cell.workload].large]
    many = [cell for cell in cells if WORKLOADS[cell.workload].many]
    overhead = [
        cell for cell in cells if cell.workload in {SMALL_1, SMALL_10} and cell.optimizer == "AdamW"
    ]
    flat = [(name, who.FUSED) for name in (who.AUTO, who.PLAIN)]
    separate = [(name, who.FUSED) for name in (who.GATHERED, who.PLAIN_GATHERED)]
    loops = [("blocked", who.LOOP), ("blocked", who.FOREACH)]
    return [
        target(
            f"`auto` at most {FLOOR_LIMIT} x the floor on large workloads",
            _pairs(large, [(one, who.FLOOR) for one in (who.AUTO, who.GATHERED)], FLOOR_LIMIT),
        ),
        target(
            "`auto`, separate gradients: never slower than torch's fused kernel",
            _pairs(cells, [(who.GATHERED, who.FUSED)], PEER_LIMIT),
        ),
        target(
            f"`auto` on one parameter of 100: at most {SMALL_LIMIT_MICROSECONDS:g} microseconds",
            _small(cell for cell in cells if cell.workload == SMALL_1),
        ),
        target(
            f"`auto` at most {PEER_LIMIT:.2f} x the best peer everywhere",
            _against_peers(cells, who.AUTO, who.PEERS, PEER_LIMIT),
        ),
        target(
            f"10,000 tensors, gradients in flat buffers: at most {MANY_FLAT_LIMIT} x torch fused",
            _pairs(many, flat, MANY_FLAT_LIMIT),
        ),
        target(
            f"10,000 tensors, separate gradients: at most {MANY_SEPARATE_LIMIT} x torch fused",
            _pairs(many, separate, MANY_SEPARATE_LIMIT),
        ),
        target(
            f"`blocked` at most {BLOCKED_LIMIT} x the floor on large workloads and many tensors",
            _pairs([*large, *many], [("blocked", who.FLOOR)], BLOCKED_LIMIT),
        ),
        target(
            "`blocked` faster than torch's for-loop and foreach everywhere",
            _pairs(cells, loops, PEER_LIMIT),
        ),
        target(
            f"AdamW on 1 and 10 small parameters: at most {OVERHEAD_LIMIT} x torch.optim's best",
            _against_peers(overhead, who.AUTO, who.TORCH_OPTIM, OVERHEAD_LIMIT),
        ),
        target(
            "`TorchOptimizer` as constructed: never slower than torch.optim's fastest",
            _against_peers(cells, who.FRONT_END, who.TORCH_OPTIM, PEER_LIMIT),
        ),
        *(
            target(
                f"`{name}`: never slower than torch.optim's fastest",
                _against_peers(cells, name, who.TORCH_OPTIM, PEER_LIMIT),
            )
            for name in (who.IN_PLACE, who.BUCKET)
        ),
        target(
            f"a thread of Python beside one that steps by `{UNRELATED_WAY}` keeps "
            f"{UNRELATED_SHARE:.0%} of its speed: at most {1 / UNRELATED_SHARE:g} x its time alone",
            _unrelated(report),
        ),
        target("a step needs less than 1 % of the parameters + 64 MiB more", _memory(report)),
        target(
            f"the first compiled step of 10 parameters in {FIRST_LIMIT_SECONDS:g} s with an empty "
            f"cache, in {READY_LIMIT_SECONDS:g} s with a full one",
            _ready(report),
        ),
        target(
            f"{convergence.RULE} in every storage ends within {TOLERANCE:g} nats + "
            f"{SPREADS:g} x float32's own spread of float32's validation loss",
            learning(report),
        ),
        *sharded_targets(report),
        *averaging_targets(report),
        *remote_targets(report),
    ]
