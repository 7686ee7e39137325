"""Claims are judged by limits that are fixed in advance, and the runs train as described."""

import math
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from benchmarks.claims import command, page
from benchmarks.claims.claims import CLAIMS, SEEDS, Claim, Difference
from benchmarks.claims.page import Measured
from benchmarks.claims.runs import (
    ADAMW_2,
    ADAMW_8,
    ALONE,
    DATA_PARALLEL,
    FED_BACK,
    MEAN_4,
    MUON_2,
    MUON_8,
    PERIOD,
    RATES,
    RUNS,
    SMALL,
    TINY,
    Run,
    adamw_within,
    best_rate,
    muon_within,
    train,
)
from hooks import PeriodicModelAverager
from hooks.demo.model import Decoder
from hooks.demo.run import HyperParameters
from tests.choices import case

FEW = TINY._replace(steps=16)


def measured(**losses: list[float]) -> Measured:
    """Return made-up losses: every run that has no losses here gets the same ones in every seed."""
    found = {name: losses.get(name, [2.0, 2.1, 2.2]) for name in RUNS}
    even = {name: [2.0, 2.1, 2.2] for name in RUNS}
    return Measured(even, found, dict.fromkeys(RUNS, 4.0))


def test_a_claim_is_reproduced_if_every_difference_holds_in_every_seed() -> None:
    claim = Claim("words", "source", (Difference("a", "b", 0.5), Difference("c", "b", -0.5)))
    b = [2.0, 3.0]
    for a, c, verdict in [
        ([2.5, 3.5], [1.5, 2.5], "reproduced"),
        ([1.0, 1.0], [0.0, 0.0], "reproduced"),
        ([2.5, 3.625], [1.5, 2.5], "not reproduced"),
        ([2.5, 3.5], [1.5, 2.75], "not reproduced"),
        ([math.nan, 3.5], [1.5, 2.5], "not reproduced"),
        ([2.5, math.inf], [1.5, 2.5], "not reproduced"),
    ]:
        with case(a=a, c=c):
            assert claim.verdict({"a": a, "b": b, "c": c}) == verdict


def test_a_difference_may_be_beyond_another() -> None:
    losses = {"a": [3.0, 3.5], "b": [2.0, 3.0], "c": [4.0, 4.0], "d": [2.5, 3.25]}
    for at_most, holds in [(-0.25, True), (-0.375, False), (-1.0, False)]:
        one = Difference("a", "b", at_most, beyond=("c", "d"))
        with case(at_most=at_most):
            assert one.measured(losses) == [-0.5, -0.25]
            assert one.holds(losses) == holds
            assert one.runs == ("a", "b", "c", "d")


def test_claims_are_about_what_is_trained() -> None:
    judged = {name for claim in CLAIMS for one in claim.differences for name in one.runs}
    assert judged == set(RUNS)
    assert len(SEEDS) == 3
    for scale in (SMALL, TINY, FEW):
        assert scale.steps % PERIOD == 0  # the last step ends in a mean of outer rules


def test_training_again_gives_the_same_and_another_seed_another() -> None:
    for name in (FED_BACK, DATA_PARALLEL):
        with case(name=name):
            first = train(RUNS[name], 0, FEW)
            assert first == train(RUNS[name], 0, FEW)
            assert first != train(RUNS[name], 1, FEW)
            assert first != train(RUNS[name], 0, FEW, rate=2.0)
    assert train(RUNS[ALONE], 0, FEW) < math.log(94) - 0.05


def test_data_parallel_is_a_mean_of_gradients() -> None:
    """With one replica, data-parallel training and a mean of parameters equal training alone.

    With more replicas, data-parallel training differs from training alone and from a mean.
    """
    alone = train(RUNS[ALONE], 0, FEW)
    one = Run(1, lambda params, group: PeriodicModelAverager(4, process_group=group))
    assert train(one, 0, FEW) == alone
    apart = [train(Run(count, None), 0, FEW) for count in (1, 2)]
    assert apart[0] == alone != apart[1]
    assert train(RUNS[MEAN_4], 0, FEW) != train(RUNS[DATA_PARALLEL], 0, FEW)


def test_two_and_eight_replicas_see_as_many_stretches_by_either_optimizer() -> None:
    for scale in (SMALL, TINY):
        for few, many in ((ADAMW_2, ADAMW_8), (MUON_2, MUON_8)):
            of_few, of_many = (
                run.replicas * (scale.batch_size // run.batch_parts)
                for run in (RUNS[few], RUNS[many])
            )
            assert of_few == of_many
    found = [train(RUNS[name], 0, FEW) for name in (ADAMW_2, ADAMW_8, MUON_2, MUON_8)]
    assert len(set(found)) == 4 and max(found) < math.log(94)
    # Both runs see the same batch, divided into the same number of stretches.
    whole, half = (
        train(RUNS[ADAMW_2]._replace(replicas=1, batch_parts=parts), 0, scale)
        for parts, scale in ((1, FEW._replace(batch_size=2)), (2, FEW))
    )
    assert whole == half


def test_muon_steps_the_matrices_of_blocks_and_the_same_adamw_all_else() -> None:
    hyper = HyperParameters(lambda made: 0.5)
    params = dict(Decoder(5, context=4, width=4, heads=2, blocks=1).named_parameters())
    states = muon_within(hyper).init(params).leaves
    muons = {name for name, leaf in states.items() if "momentum_buffer" in leaf.stages[-1]._fields}
    assert muons == {name for name, one in params.items() if one.ndim == 2 and "blocks" in name}
    inner, alone = muon_within(hyper).hyper, adamw_within(hyper).hyper
    assert inner["rest.betas"] == alone["betas"] == hyper.betas
    for label in ("rest", "matrices"):
        assert inner[f"{label}.weight_decay"] == hyper.weight_decay
    assert inner["matrices.adjust_lr_fn"] == "match_rms_adamw"


def test_the_best_rate_is_that_of_the_least_mean_and_never_of_nan() -> None:
    for losses, best in [
        ([[3.0, 3.0], [2.0, 2.5], [1.0, 4.0]], 1),
        ([[2.0, 2.0], [1.0, math.nan], [3.0, 1.5]], 0),
        ([[math.nan], [math.inf], [2.0]], 2),
        ([[math.nan]] * 3, 0),
    ]:
        with case(losses=losses):
            assert best_rate(dict(zip(RATES, losses, strict=True))) == RATES[best]


def test_the_page_has_what_was_measured() -> None:
    text = page.page(measured(**{ALONE: [2.5, 2.5, 2.8]}), SMALL)
    for part in (
        "| 1 replica | 1 | 2.100 (2.000 to 2.200) | 4 | 2.600 (2.500 to 2.800) |",
        "less 1 replica: at most +0.00 | +0.000 (+0.000 to +0.000) | **reproduced** |",
        "+0.000) | **reproduced** | -0.500 (-0.600 to -0.400) | **reproduced** |",
        "less DiLoCo, float32: at most +0.02 | +0.000 (+0.000 to +0.000) | **not reproduced** |",
        f"({MUON_8}, less {MUON_2}), less ({ADAMW_8}, less {ADAMW_2}): at most -0.02 | +0.000",
        "1, 2, 4, 8 replicas",
        "each of the 8 replicas gets 2 samples",
        f"{SMALL.steps} steps",
        *(claim.source for claim in CLAIMS),
    ):
        with case(part=part):
            assert part in text


def test_the_command_measures_every_run_and_writes_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    kept = {name: RUNS[name] for name in (DATA_PARALLEL, ALONE)}
    monkeypatch.setattr(command, "RUNS", kept)
    monkeypatch.setattr(command, "SEEDS", SEEDS[:1])
    threads = torch.get_num_threads()
    found = command.measured(FEW)
    assert set(found.same) == set(found.best) == set(found.rates) == set(kept)
    for name, rate in found.rates.items():
        assert found.same[name] == [train(RUNS[name], SEEDS[0], FEW, RATES[0])]
        assert found.best[name] == [train(RUNS[name], SEEDS[0], FEW, rate)]
    assert torch.get_num_threads() == threads

    file = tmp_path / "claims.md"
    monkeypatch.setattr(command, "PAGE", file)
    monkeypatch.setattr(command, "measured", lambda scale: measured())
    result = CliRunner().invoke(command.claims, ["--write"])
    assert result.exit_code == 0, result.output
    assert file.read_text(encoding="utf-8") == page.page(measured(), SMALL)
    assert "one replica, too: at one rate reproduced, at the best rates reproduced" in result.output
    refused = CliRunner().invoke(command.claims, ["--write", "--tiny"])
    assert refused.exit_code == click.UsageError.exit_code and "whole runs" in refused.output
