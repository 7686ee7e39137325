"""Models on a server: all contestants step a tiny model, and the report judges and shows it."""

import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from click.testing import CliRunner

from benchmarks import child, remote_run
from benchmarks import remote as who
from benchmarks.command import bench
from benchmarks.plan import Part, Settings, parts
from benchmarks.records import Remote, Report, report_from
from benchmarks.remote_server import serve
from benchmarks.remote_targets import remote_targets
from benchmarks.remote_ways import OverThreads, Trainers
from benchmarks.tables import details, summary
from functional_optim.native.loader import SWITCH
from tests.choices import case
from tests.ranks import Job, run_ranks

from .conftest import PATIENCE
from .reports import report, stepped

MODEL = "4 M in 8"
ROUNDS = 2

# ---------------------------------------------------------------------------------- the measurement


def drive(meeting: str) -> list[Any]:
    """Run the measurement on two ranks: one is the trainers' process, the other is the server."""
    # init_rpc of torch uses deprecated functions, and its optimizer uses TorchScript.
    with warnings.catch_warnings(record=True), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv(SWITCH, "0")
        patch.setattr(who, "TRAINERS", (1, 2))
        if dist.get_rank() == 1:
            serve(meeting)
            return []
        told: list[str] = []
        with remote_run.joined(meeting):
            rules = ["SGD", "QHM"]
            found = remote_run.measured(MODEL, rules, "tiny", ROUNDS, told.append)
        return [told, [asdict(one) for one in found]]


def test_a_tiny_model_is_stepped_by_all(tmp_path: Path) -> None:
    """All contestants of two rules step a tiny model, and every time is measured.

    The test starts fresh processes, because torch's RPC can start only once in a process.
    """
    job = Job(drive, {"meeting": str(tmp_path / "meeting")})
    first, _ = run_ranks({"drive": job}, ranks=2, seconds=PATIENCE, fresh=True)["drive"]
    told, found = first.result()
    assert told == [f"{rule}, trainers: {count}" for rule in ("SGD", "QHM") for count in (1, 2)]
    for one in (Remote(**each) for each in found):
        with case(rule=one.optimizer, trainers=one.trainers):
            assert one.failed == {}
            assert (one.model, one.parameters, one.tensors) == (MODEL, 40, 2)
            for times in (one.seconds, one.alone, one.beside):
                assert list(times) == who.names_of(one.optimizer)
                assert all(len(each) == ROUNDS and min(each) > 0 for each in times.values())


class Counted:
    """Optimizer that records which trainer made each step."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.trainers = 0

    def gradients(self) -> Any:
        """Return a context that numbers the trainers."""
        return self

    def __enter__(self) -> int:
        self.trainers += 1
        return self.trainers

    def __exit__(self, *_: object) -> None:
        self.trainers -= 1

    def step(self, gradients: int) -> None:
        """Record a step of a trainer."""
        self.steps.append(gradients)

    def python_seconds(self, count: int) -> float:
        """Wait until all three trainers have stepped."""
        self.steps.clear()
        while len({*self.steps}) < 3:
            pass
        return float(count)

    def moved(self) -> list[float]:
        """Return distances that say that one parameter has not moved."""
        return [1.0, 0.0]

    def close(self) -> None:
        """Do nothing."""


def test_every_trainer_steps_by_gradients_of_its_own() -> None:
    way = Counted()
    with Trainers(way, 3) as trainers:
        assert trainers.seconds_per_step(5) > 0
        assert sorted(way.steps) == [1] * 5 + [2] * 5 + [3] * 5
        assert trainers.python_seconds(7) == 7.0
        made = len(way.steps)
        assert made >= 3
    assert way.trainers == 0 and len(way.steps) == made


def test_who_leaves_a_parameter_alone_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(who, "names_of", lambda rule: [who.RPC, who.THREADS])
    monkeypatch.setattr(
        remote_run, "way", lambda name, *_: broken if name == who.RPC else Counted()
    )
    broken: Any = None
    (first, *_) = remote_run.measured(MODEL, ["SGD"], "tiny", ROUNDS, print)
    assert first.seconds == {} and [*first.failed] == [who.RPC, who.THREADS]
    assert "AttributeError" in first.failed[who.RPC]
    assert first.failed[who.THREADS] == (
        "RuntimeError: a step left a parameter as it was, though it has a gradient"
    )


def test_over_threads_parameters_move() -> None:
    way = OverThreads("QHM", [(3,), (2, 2)])
    assert way.moved() == [0.0, 0.0]
    with Trainers(way, 2) as trainers:
        trainers.seconds_per_step(2)
    assert min(way.moved()) > 0 and way.python_seconds(10) > 0
    way.close()


def test_models_have_the_sizes_of_their_names() -> None:
    found = {
        name: (one.numel("full"), len(one.parameters("full"))) for name, one in who.MODELS.items()
    }
    assert found == {
        "0.3 M in 40": (300_000, 40),
        "4 M in 8": (4_000_000, 8),
        "4 M in 400": (4_000_000, 400),
    }


# ------------------------------------------------------------------------- promises and the report


def changed(at: int, of: Report | None = None, **fields: Any) -> Report:
    """Return a report in which the fields of one cell are changed."""
    found = of or report()
    cells = [*found.remote]
    cells[at] = replace(cells[at], **fields)
    return replace(found, remote=cells)


def at(rule: str, model: str, trainers: int = 2) -> int:
    """Return the index of a cell."""
    cells = [(one.optimizer, one.model, one.trainers) for one in report().remote]
    return cells.index((rule, model, trainers))


def test_each_promise_can_be_missed() -> None:
    counts = [len(one.checks) for one in remote_targets(report())]
    assert counts == [18, 6, 9, 27]
    names = (who.RPC, who.SCRIPTED, who.PYTHON)
    for rule, model, seconds, missed in (
        ("SGD", "0.3 M in 40", (1.0, 1.0, 1.0), []),
        ("SGD", "4 M in 8", (1.01, 1.0, 9.0), [0]),
        ("AdamW", "0.3 M in 40", (1.0, 1.1, 1.0), []),
        ("AdamW", "4 M in 400", (1.0, 1.31, 1.0), []),
        ("AdamW", "4 M in 400", (1.0, 1.29, 9.0), [1]),
        ("AdamW", "4 M in 8", (1.0, 0.99, 9.0), [0, 1]),
        ("QHM", "4 M in 8", (1.0, 9.0, 1.51), []),
        ("QHM", "0.3 M in 40", (1.0, 9.0, 1.49), [2]),
    ):
        times = {name: [one, one] for name, one in zip(names, seconds, strict=True)}
        found = remote_targets(changed(at(rule, model), seconds=times))
        with case(rule=rule, model=model, seconds=seconds):
            assert [k for k, one in enumerate(found) if one.verdict != "met"] == missed
    for share, verdict in ((0.79, "**MISSED**"), (0.81, "met")):
        alone, beside = {who.RPC: [share]}, {who.RPC: [1.0]}
        found = remote_targets(changed(0, alone=alone, beside=beside))
        assert found[3].verdict == verdict
    worst = remote_targets(
        changed(
            at("SGD", "4 M in 8"),
            seconds={
                who.RPC: [2.0, 4.0],
                who.SCRIPTED: [1.0, 1.0],
            },
        )
    )[0].worst
    assert worst is not None and worst.where == "SGD, 4 M in 8, 2 trainers"
    assert worst.shown == "0.38 (0.25 to 0.50) x"


def test_what_was_not_measured_is_not_kept() -> None:
    empty = replace(report(), remote=[])
    assert {one.verdict for one in remote_targets(empty)} == {"not measured"}
    name = who.TITLE + MODEL
    for one in remote_targets(replace(empty, failed={name: "ended with 1"})):
        assert one.missing == (name,) and "MISSED" in one.verdict
    lost = changed(at("AdamW", MODEL, 1), seconds={}, alone={}, beside={}, failed={who.RPC: "no"})
    found = remote_targets(lost)
    assert [one.missing for one in found] == [("AdamW, 4 M in 8, 1 trainer",)] * 2 + [()] + [
        ("AdamW, 4 M in 8, 1 trainer",)
    ]
    assert "- remote, AdamW, 4 M in 8, 1 trainer: ours, RPC: no" in details(lost)


def test_tables_have_steps_per_second() -> None:
    found = changed(
        at("SGD", MODEL),
        seconds={
            who.RPC: [0.001, 0.002],
            who.THREADS: [0.0005, 0.0005],
            who.SCRIPTED: [0.002, 0.002],
            who.PYTHON: [0.004, 0.004],
        },
        alone={who.RPC: [0.9, 0.8]},
        beside={who.RPC: [1.0, 1.0]},
    )
    shown = details(found)
    assert (
        "| SGD, 4 M in 8, 2 trainers | 667 | 1.50 (1.00 to 2.00) | 3.00 (2.00 to 4.00) "
        "| 4.00 (4.00 to 4.00) | 8.00 (8.00 to 8.00) |"
    ) in shown
    assert "| SGD, 4 M in 8, 2 trainers | 0.85 (0.80 to 0.90) | — | — | — |" in shown
    assert "| QHM, 4 M in 8, 4 trainers | 1,000 | — | 2.00" in shown
    assert "QHM: at least 1.5 x the steps per second" in summary(found)
    assert "## DistributedOptimizer" not in details(replace(found, remote=[]))


def test_earlier_reports_load() -> None:
    kept = asdict(report())
    kept.pop("remote")
    assert report_from(kept) == replace(report(), remote=[])


# ----------------------------------------------------------------------------------------- the plan


def plan(settings: Settings) -> list[Part]:
    return [part for part in parts(settings, "") if part.section == "remote"]


def test_a_process_for_each_model() -> None:
    found = plan(Settings("full", 9, 2, optimizers=("Lion", "QHM", "SGD")))
    assert [part.name for part in found] == [who.TITLE + name for name in who.MODELS]
    assert {part.threads for part in found} == {1}
    assert all(part.given["rules"] == ["SGD", "QHM"] for part in found)
    assert plan(Settings("full", 9, 2, contestants=("floor",))) == []
    assert plan(Settings("full", 9, 2, optimizers=("Lion",))) == []


@pytest.mark.usefixtures("parts_here")
def test_the_section_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(
        *, model: str, rules: list[str], size: str, rounds: int, tell: Callable[[str], object]
    ) -> list[Remote]:
        tell("x")
        assert (size, rounds) == ("tiny", 2)
        return [stepped(rule, model, count) for rule in rules for count in who.TRAINERS]

    monkeypatch.setattr(remote_run, "run_remote", measured)
    assert "remote" in child.PARTS
    options = ["--size=tiny", "--rounds=2", "--section=remote", f"--output={tmp_path}"]
    result = CliRunner().invoke(bench, options)
    assert result.exit_code == 0, result.output
    found = Report.load(tmp_path / "bench.json")
    assert found.failed == {} and found.remote == report().remote
    assert "## DistributedOptimizer" in (tmp_path / "bench.md").read_text(encoding="utf-8")
