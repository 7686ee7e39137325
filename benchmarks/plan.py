"""Plan of a run: its parts, their order, and the time of each contestant."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from benchmarks import (
    averaging,
    convergence,
    memory,
    ready,
    remote,
    sharded,
    sharded_balance,
    threads,
)
from benchmarks.cases import CASES
from benchmarks.process import LIMIT_SECONDS
from benchmarks.workloads import WORKLOADS, Size

Section = Literal[
    "steps", "memory", "threads", "ready", "convergence", "sharded", "averaging", "remote", "gpu"
]
SECTIONS: tuple[Section, ...] = get_args(Section)
GPU_OPTIMIZERS = ("AdamW", "Lion", "QHM")
QUICK_SECTIONS: tuple[Section, ...] = tuple(one for one in SECTIONS if one != "ready")
"""Sections of a quick run. The compile times with empty caches are left out."""
QUICK_OPTIMIZERS = ("AdamW", "Lion", "clip + decay + QHM")


@dataclass(frozen=True)
class Settings:
    """Settings of a run."""

    size: Size
    rounds: int
    threads: int
    sections: Sequence[str] = SECTIONS
    workloads: Sequence[str] = tuple(WORKLOADS)
    optimizers: Sequence[str] = tuple(CASES)
    contestants: Sequence[str] = ()
    """Names of the contestants to measure; empty for all."""
    places: Sequence[str] = tuple(sharded.PLACES)
    """Places of sharded training."""

    @property
    def turn_seconds(self) -> float:
        """Return the least length of a turn, in seconds."""
        return {"full": 0.05, "quick": 0.01, "tiny": 0.001}[self.size]

    @property
    def complete(self) -> bool:
        """Return True if the run measures all figures of the promises, in full size."""
        return self == Settings("full", self.rounds, self.threads)


class Part(NamedTuple):
    """Process of a run."""

    section: Section
    name: str
    kind: str
    """Job of the process: a key of ``benchmarks.child.PARTS``."""
    given: dict[str, Any]
    threads: int
    environment: dict[str, str]
    limit_seconds: float = LIMIT_SECONDS


def parts(settings: Settings, scratch: str) -> Iterator[Part]:
    """Yield every process of a run.

    Args:
        settings: the settings of the run.
        scratch: an empty folder for the compile caches, so that the first compilation finds none.
    """
    for section in SECTIONS:
        if section in settings.sections:
            yield from _PLANS[section](settings, scratch)


def _cells(
    settings: Settings, section: Section, device: str, every: Sequence[str]
) -> Iterator[Part]:
    for workload in settings.workloads:
        for optimizer in settings.optimizers:
            if optimizer not in every:
                continue
            given = {
                "workload": workload,
                "optimizer": optimizer,
                "device": device,
                "size": settings.size,
                "rounds": settings.rounds,
                "turn_seconds": settings.turn_seconds,
                "threads": settings.threads,
                "only": list(settings.contestants),
            }
            name = f"{optimizer}, {workload}{', cuda' if device == 'cuda' else ''}"
            yield Part(section, name, "cell", given, settings.threads, {})


def _steps(settings: Settings, scratch: str) -> Iterator[Part]:
    every = QUICK_OPTIMIZERS if settings.size == "quick" else tuple(CASES)
    yield from _cells(settings, "steps", "cpu", every)


def _gpu(settings: Settings, scratch: str) -> Iterator[Part]:
    yield from _cells(settings, "gpu", "cuda", GPU_OPTIMIZERS)


def _memory(settings: Settings, scratch: str) -> Iterator[Part]:
    rules = [rule for rule in memory.RULES if rule in settings.optimizers]
    for workload in settings.workloads if rules else ():
        given = {
            "workload": workload,
            "size": settings.size,
            "rules": rules,
            "ways": list(settings.contestants),
        }
        yield Part("memory", f"memory, {workload}", "memory", given, settings.threads, {})


def _threads(settings: Settings, scratch: str) -> Iterator[Part]:
    for way in threads.WAYS:
        if settings.contestants and way not in settings.contestants:
            continue
        given = {
            "way": way,
            "size": settings.size,
            "rounds": settings.rounds,
            "turn_seconds": settings.turn_seconds,
        }
        yield Part("threads", f"two threads: {way}", "threads", given, 1, {})


def _ready(settings: Settings, scratch: str) -> Iterator[Part]:
    """Yield the processes of each way. The first one fills the caches for the later ones."""
    warm = 3 if settings.size == "full" else 1
    for way in ready.WAYS:
        if settings.contestants and way not in settings.contestants:
            continue
        folder = f"{scratch}/{way.replace(' ', '-')}"
        environment = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch", "XDG_CACHE_HOME": folder}
        given = {"way": way, "size": settings.size}
        for number in range(warm + 1):
            name = f"ready: {way}, process {number + 1}"
            yield Part("ready", name, "ready", given, settings.threads, environment)


def _convergence(settings: Settings, scratch: str) -> Iterator[Part]:
    if convergence.RULE not in settings.optimizers:
        return
    if settings.contestants and convergence.WAY not in settings.contestants:
        return
    for name in convergence.QUICK_RUNS if settings.size == "quick" else convergence.RUNS:
        given = {
            "name": name,
            "size": settings.size,
            "rounds": settings.rounds,
            "turn_seconds": settings.turn_seconds,
        }
        title = convergence.TITLE + name
        yield Part("convergence", title, "convergence", given, settings.threads, {})


SHARDED_SECONDS = 3600.0
"""Limit for four heats on more ranks than cores. Each contestant that hangs restarts a heat."""

MEMORY_TURNS = 5
"""Number of turns. The peak depends on the order in which threads allocate memory."""


def _sharded(settings: Settings, scratch: str) -> Iterator[Part]:
    every = sharded.QUICK_PLACES if settings.size == "quick" else tuple(sharded.PLACES)
    places = [sharded.PLACES[name] for name in every if name in settings.places]
    chosen = [name for name in settings.contestants if name in sharded.NAMES]
    if sharded.RULE not in settings.optimizers or (settings.contestants and not chosen):
        return

    def part(title: str, kind: str, **given: Any) -> Part:
        return Part("sharded", f"sharded{title}", kind, given, 1, {}, SHARDED_SECONDS)

    for place in places:
        more: dict[str, Any] = {"rounds": settings.rounds, "only": chosen}
        yield part(f", {place}", "sharded", **place._asdict(), size=settings.size, **more)
    place = sharded.MEMORY_PLACE
    for turn in range(min(settings.rounds, MEMORY_TURNS) if place in places else 0):
        for name in chosen or sharded.NAMES:
            more = {"size": settings.size, "name": name}
            title = f" memory {turn + 1}, {place}: {name}"
            yield part(title, "sharded peak", **place._asdict(), **more)
    if chosen:
        return
    place = sharded.SAVING_PLACE
    if str(place) in settings.places:
        more = {"size": settings.size, "rounds": settings.rounds}
        yield part(f" saving, {place}", "sharded saving", **place._asdict(), **more)
    if places:
        for model in sharded_balance.MODELS:
            yield part(f" balance, {model}", "balance", model=model)


def _averaging(settings: Settings, scratch: str) -> Iterator[Part]:
    """Yield all parts of averaging, or none: no single part can be chosen."""
    if settings.contestants or averaging.RULE not in settings.optimizers:
        return
    given = {"size": settings.size, "names": list(averaging.WAYS)}
    yield Part("averaging", averaging.BYTES, "averaging sent", given, 1, {})
    given = {"size": settings.size, "names": list(averaging.RACERS)}
    yield Part("averaging", averaging.RACE, "averaging races", given, 1, {})


def _remote(settings: Settings, scratch: str) -> Iterator[Part]:
    rules = [rule for rule in remote.RULES if rule in settings.optimizers]
    if settings.contestants or not rules:
        return
    for model in remote.MODELS:
        given = {"model": model, "rules": rules, "size": settings.size, "rounds": settings.rounds}
        yield Part("remote", remote.TITLE + model, "remote", given, 1, {})


_PLANS = {
    "steps": _steps,
    "memory": _memory,
    "threads": _threads,
    "ready": _ready,
    "convergence": _convergence,
    "sharded": _sharded,
    "averaging": _averaging,
    "remote": _remote,
    "gpu": _gpu,
}
