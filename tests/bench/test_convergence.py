"""Every storage trains on the same text, and its loss is compared with that of float32."""

import dataclasses
import math
from functools import cache
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import contestants as who
from benchmarks import convergence
from benchmarks.command import bench
from benchmarks.convergence import AGAIN, FLOAT32, JUDGED, NEAREST, QUICK_RUNS, RUNS, Scale
from benchmarks.distances import allowed, distance
from benchmarks.plan import QUICK_SECTIONS, SECTIONS, Settings, parts
from benchmarks.records import Convergence, Report
from benchmarks.tables import details, summary
from benchmarks.targets import Target, targets
from functional_optim.storage import CHOICES, STATE_STORAGES
from hooks.demo.model import Decoder
from tests.choices import case

from .reports import LOSSES, report, trained

KAHAN, SMALL = "bfloat16+kahan", "bfloat16+stochastic, state int8+stochastic"


def train(name: str) -> Convergence:
    told: list[str] = []
    found = convergence.run_convergence(
        name=name, size="tiny", rounds=2, turn_seconds=0.0001, tell=told.append
    )
    assert "step 30 of 40" in told
    return found


@cache
def trained_once() -> Convergence:
    return train(FLOAT32)


@pytest.fixture
def plain() -> Convergence:
    return trained_once()


def target(of: Report) -> Target:
    return next(one for one in targets(of) if "in every storage" in one.promise)


def with_losses(**losses: float) -> Report:
    """Return the made-up report with other losses for some runs. NaN removes the run."""
    found = report()
    kept = {**LOSSES, **losses}
    found.convergence[:] = [
        trained(name, loss) for name, loss in kept.items() if not math.isnan(loss)
    ]
    return found


# ------------------------------------------------------------------------------ the measurement


def test_training_learns_and_again_gives_the_same(plain: Convergence) -> None:
    assert plain.loss < plain.start - 0.3
    assert plain.steps == 40
    assert len(plain.seconds[FLOAT32]) == 2
    again, other = train(FLOAT32), train(AGAIN)
    assert (again.start, again.loss) == (plain.start, plain.loss)
    assert other.start != plain.start and other.loss != plain.loss


def test_a_storage_learns_as_float32_does(plain: Convergence) -> None:
    for name in (SMALL, "float32, state int8+stochastic"):
        found = train(name)
        with case(name=name):
            assert found.loss != plain.loss
            assert found.start == pytest.approx(plain.start, abs=0.02)  # first weights, rounded
            assert found.loss == pytest.approx(plain.loss, abs=0.02)
            assert found.bytes_per_parameter < plain.bytes_per_parameter
            assert found.parameters == plain.parameters
            assert {key: len(times) for key, times in found.seconds.items()} == {
                FLOAT32: 2,
                name: 2,
            }
            wanted = torch.float32 if name.startswith("float32") else torch.bfloat16
            assert f"of {wanted} on cpu" in found.ran


def test_a_storage_that_forgets_is_seen(
    monkeypatch: pytest.MonkeyPatch, plain: Convergence
) -> None:
    """A storage that loses the state gets a worse loss.

    This shows that the comparison with float32 above can fail.
    """
    lossy = STATE_STORAGES["int8"]._replace(decode=lambda kept: kept[0].float() * 0 + 1.0)
    monkeypatch.setitem(STATE_STORAGES, "int8+stochastic", lossy)
    monkeypatch.setitem(RUNS, SMALL, RUNS["float32, state int8+stochastic"])
    assert train(SMALL).loss > plain.loss + 0.1


def test_the_model_of_a_bfloat16_run_is_bfloat16_and_its_loss_is_not() -> None:
    scale = Scale(1, 1, 1.0, {"context": 8, "width": 8, "heads": 2, "blocks": 1})
    model = convergence._decoder(5, scale, RUNS[KAHAN])
    assert isinstance(model, Decoder)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert convergence.Widened(model)(torch.zeros(1, 8, dtype=torch.int64)).dtype == torch.float32


# ------------------------------------------------------------------------------------- the plan


def test_every_choice_is_trained_and_judged() -> None:
    assert {*JUDGED, FLOAT32} == set(CHOICES)
    assert set(RUNS) == {*CHOICES, AGAIN, NEAREST}
    assert set(QUICK_RUNS) <= set(RUNS)
    assert {FLOAT32, AGAIN} < set(QUICK_RUNS)
    assert RUNS[AGAIN].seed != RUNS[FLOAT32].seed
    assert "convergence" in QUICK_SECTIONS
    assert "convergence" in SECTIONS


def test_the_plan_has_a_part_for_each_run() -> None:
    for settings, names in (
        (Settings("full", 9, 2), tuple(RUNS)),
        (Settings("quick", 3, 2), QUICK_RUNS),
        (Settings("full", 9, 2, optimizers=("SGD",)), ()),
        (Settings("full", 9, 2, contestants=(who.FUSED,)), ()),
    ):
        plan = [part for part in parts(settings, "scratch") if part.section == "convergence"]
        with case(settings=settings):
            assert tuple(part.given["name"] for part in plan) == names


@pytest.mark.usefixtures("parts_here")
def test_two_runs_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {name: RUNS[name] for name in (FLOAT32, KAHAN)}
    monkeypatch.setattr(convergence, "RUNS", kept)
    options = ["--size=tiny", "--threads=1", "--section=convergence", f"--output={tmp_path}"]
    result = CliRunner().invoke(bench, options)
    assert result.exit_code == 0, result.output
    found = Report.load(tmp_path / "bench.json")
    assert found.failed == {}
    assert [one.name for one in found.convergence] == [FLOAT32, KAHAN]
    assert all(one.loss < one.start for one in found.convergence)
    assert f"1/2 training in {KAHAN}" in result.output
    text = (tmp_path / "bench.md").read_text(encoding="utf-8")
    assert "## Training in every storage" in text
    assert "float32 was not trained from both seeds" in text
    assert target(found).missing == (f"training in {KAHAN}",)


# ------------------------------------------------------------------------------------ the target


def test_the_limit_is_the_tolerance_and_twice_the_spread() -> None:
    found = with_losses()
    assert allowed(found) == pytest.approx(0.02 + 2 * 0.03)
    assert distance(found, KAHAN) == pytest.approx(0.01)
    assert target(found).verdict == "met"
    assert len(target(found).checks) == len(JUDGED)


def test_the_limit_holds_on_either_side() -> None:
    for loss, met in ((2.07, True), (1.93, True), (2.09, False), (1.91, False), (math.inf, False)):
        found = target(with_losses(**{KAHAN: loss}))
        with case(loss=loss):
            assert (found.verdict == "met") == met and ("MISSED" in found.verdict) == (not met)
            assert found.worst is not None
            assert met or found.worst.where == f"training in {KAHAN}"


def test_a_loss_that_is_nan_misses() -> None:
    found = with_losses()
    at = next(i for i, one in enumerate(found.convergence) if one.name == KAHAN)
    found.convergence[at] = trained(KAHAN, math.nan)
    assert "MISSED" in target(found).verdict
    assert f"| {KAHAN} | 10.00 | nan | +inf | **MISSED** |" in details(found)


def test_what_failed_misses_unless_it_is_not_judged() -> None:
    found = with_losses(**{NEAREST: 3.0, KAHAN: math.nan})
    found.failed[f"training in {NEAREST}"] = "ended with 1"
    assert target(found).verdict == "met"  # the other run was not requested
    found.failed[f"training in {KAHAN}"] = "ended with 1"
    assert target(found).missing == (f"training in {KAHAN}",)
    assert "MISSED" in target(found).verdict


def test_without_float32_nothing_is_kept() -> None:
    for name in (FLOAT32, AGAIN):
        found = target(with_losses(**{name: math.nan}))
        with case(name=name):
            assert "MISSED" in found.verdict
            assert len(found.missing) == len(JUDGED)


# -------------------------------------------------------------------------------------- the report


def test_the_table_has_what_was_measured() -> None:
    found = with_losses(**{KAHAN: 2.09})
    text = details(found)
    for part in (
        "1,000 parameters) and text, 200 steps at a learning rate of at most 0.0003;",
        "4.500 before the first step",
        "float32's loss changes by 0.030 with the seed: allowed is 0.02 + 2 x 0.030 = 0.080",
        f"| {FLOAT32} | 10.00 | 2.000 | — | not judged | — |",
        f"| {AGAIN} | 10.00 | 2.030 | +0.030 | not judged | — |",
        f"| {KAHAN} | 10.00 | 2.090 | +0.090 | **MISSED** | 2.00 (1.50 to 2.50) |",
        f"| {SMALL} | 10.00 | 2.010 | +0.010 | met | 2.00 (1.50 to 2.50) |",
        f"| {NEAREST} | 10.00 | 2.500 | +0.500 | not judged | 2.00 (1.50 to 2.50) |",
        f"- {KAHAN}: compile; compiled\n",
    ):
        assert part in text
    assert f"+0.090, at most 0.080 either way, at training in {KAHAN}" in summary(found)
    nothing = dataclasses.replace(found, convergence=[])
    assert "Training in every storage" not in details(nothing)
