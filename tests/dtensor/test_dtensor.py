"""Parameters of which each rank holds a shard, on real processes (fault 20)."""

from typing import Any

import pytest

from tests.ranks import Job, Outcomes, run_ranks

from . import jobs

CASES: dict[str, dict[str, Any]] = {
    **{
        f"{model}, {executor}": {"model": model, "executor": executor}
        for model in jobs.MODELS
        for executor in ("reference", "blocked", "script", "auto")
    },
    "fsdp, bfloat16": {"dtype": "bfloat16"},
    "by hand, bfloat16, blocked": {"model": "by hand", "dtype": "bfloat16", "executor": "blocked"},
}
"""Which are torch's AdamW(foreach=False) bit for bit."""

AS_PLAIN: dict[str, dict[str, Any]] = {
    "fused": {"executor": "fused"},
    **{
        f"complex, {executor}": {"model": "by hand", "dtype": "complex64", "executor": executor}
        for executor in ("reference", "blocked")
    },
}
"""Which are what plain tensors of the same values are: torch's own loses the steps of complex
shards of different sizes."""

OTHERS = ("checkpoints", "clipped", "in_backward")


def launch(ranks: int) -> Outcomes:
    found: Outcomes = run_ranks(
        {
            **{name: Job(jobs.adamw_as_torch, {"case": case}) for name, case in CASES.items()},
            **{name: Job(jobs.as_plain_tensors, {"case": case}) for name, case in AS_PLAIN.items()},
            **{name: Job(getattr(jobs, name)) for name in (*OTHERS, "refused", "twice")},
        },
        ranks=ranks,
        seconds=60,
    )
    return found


@pytest.fixture(scope="module", params=[2, 3])
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    return launch(request.param)


@pytest.mark.parametrize("name", [*CASES, *AS_PLAIN, *OTHERS])
def test_shards_are_stepped_as_torch_steps_them(outcomes: Outcomes, name: str) -> None:
    """Bit for bit, in every way that takes them (fault 20)."""
    for outcome in outcomes[name]:
        assert set(outcome.result().values()) == {True}, outcome.result()


REFUSED = {
    "script": (
        "'0.bias' is a DTensor",
        "a TorchScript program takes plain tensors",
        "to_local()",
    ),
    "export": ("'0.bias' is a DTensor", "an exported step takes plain tensors"),
    "capturable": ("'0.bias' is a DTensor", "a step that may be captured takes plain tensors"),
    "zero": ("is a DTensor", "ZeroRedundancyOptimizer", "takes plain tensors"),
    "measured": ("is a DTensor", "clip_by_global_norm needs more", "executor='reference'"),
    "measure": ("is a DTensor", "clip_by_global_norm needs more"),
    "blocks": ("is a DTensor", "needs more than that", "executor='reference'"),
    "replicated": ("gradient at '0.weight'", "Replicate()", "Shard(dim=1)", "redistribute()"),
    "elsewhere": ("gradient at '0.weight'", "Shard(dim=0)", "Shard(dim=1)"),
    "plain": ("gradient at '4.bias' is a plain tensor", "DTensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_step_a_shard_says_so(outcomes: Outcomes, name: str) -> None:
    """It names the parameter, and the way out; nothing has been changed (fault 20)."""
    for outcome in outcomes["refused"]:
        said = outcome.result()
        for part in REFUSED[name]:
            assert part in said[name], said[name]
        assert said["untouched"] == "True"


def test_one_shard_at_two_places(outcomes: Outcomes) -> None:
    """Shared memory is found by shards, and said where it is true only (fault 20)."""
    for outcome in outcomes["twice"]:
        assert "'b' shares its memory with 'a'" in outcome.result()["said"]
