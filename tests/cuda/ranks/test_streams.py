"""Tests over NCCL that hooks and averagers with late streams never read unwritten memory."""

from typing import Any

import pytest
import torch

from tests.choices import case

from . import streams
from .outcomes import EXACT, outcomes_of

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

LATE = [
    {"name": "tower", "kind": "scatter", "policy": "greedy", "iterations": 60, "side": False},
    {"name": "tower", "kind": "scatter", "policy": "elements", "iterations": 40, "side": True},
    {"name": "tower", "kind": "interleaved", "policy": "greedy", "iterations": 40, "side": False},
    {"name": "prodigy", "kind": "scatter", "policy": "elements", "iterations": 30, "side": True},
    {"name": "unused", "kind": "held", "policy": "greedy", "iterations": 20, "side": False},
]


def test_hooks_when_streams_are_late() -> None:
    """Two ranks add in one order, so without totals the result has the bits of one process."""
    wrong = []
    for one, seen in outcomes_of(streams.hook_when_late, LATE, 2):
        assert seen[0]["digest"] == seen[1]["digest"]
        exact = one["name"] in EXACT
        if any(rank["apart"] > (0.0 if exact else 1e-4) for rank in seen):
            wrong.append((one, seen))
        if exact and not all(rank["losses"] for rank in seen):
            wrong.append((one, seen))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("ranks", [2, 4])
def test_means_in_the_background(ranks: int) -> None:
    for _, seen in outcomes_of(streams.background_means, [{"iterations": 100}], ranks):
        assert seen == [{"wrong": []}] * ranks


WAITS: list[tuple[dict[str, Any], float]] = [({}, 0.0), ({"max_norm": 0.1}, 1.0)]
"""Options of a hook, and how often the host may wait in an iteration."""


def test_the_host_goes_on_and_memory_stays() -> None:
    cases = [{"options": options, "iterations": 10} for options, _ in WAITS]
    most = [count for _, count in WAITS]
    for (one, seen), count in zip(
        outcomes_of(streams.synchronisations, cases, 2), most, strict=True
    ):
        with case(**one):
            for rank in seen:
                assert rank["waits"] <= count, rank
                assert rank["grown"] == 0, rank


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_one_bad_rank(poison: float) -> None:
    for _, seen in outcomes_of(streams.one_bad_rank, [{"poison": poison}], 2):
        assert seen == [{"moved": [True, False, True], "finite": True}] * 2
