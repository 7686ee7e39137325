"""Laws of executors that compile, for every case. Few runs suffice, since each may compile."""

import itertools
from typing import Any

import pytest

from functional_optim import Optimizer, chain, partition
from functional_optim.testing import LAWS, Subject
from functional_optim.testing.runs import MAX_STEPS, REAL_DTYPES, SMALL_SHAPES, Run

from ...choices import EVERYTHING, case, has_turn
from ..support import SLOW, TABLE, require_of_runs, seeded_run

SHAPES = ((300,), *SMALL_SHAPES, (1, 2, 1, 2))
"""The first shape is more than one block of a compiled loop."""
RUN_OF = {
    "compiled is reference": 0,
    "auto is reference": 0,
    "script is reference": 1,
    **{law: place for place, law in enumerate(SLOW)},
}
"""The one of two runs on which a law is checked; of every second chain, the other one."""
NON_EMPTY = ((2, 3), (), (3,), (1, 2, 1, 2))


@pytest.mark.parametrize("name", TABLE)
def test_laws_of_compiled_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled C++ loops, requested or automatic, and TorchScript match the reference.

    The laws share two runs. A chain is compiled as a loop for one run and as a script for the
    other, by turns, and each slow law has one of them. If everything is tested, each law has all
    runs.
    """
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 64)
    subject = TABLE[name].subject()
    known = {law: LAWS[law] for law in RUN_OF if LAWS[law].concerns(subject)}

    turn = list(TABLE).index(name) // len(REAL_DTYPES)  # so that each law has all dtypes
    places = itertools.count()

    def check(run: Run) -> None:
        place = next(places)
        for law, one in known.items():
            is_tried = has_turn(2, turn, RUN_OF[law], place)
            if is_tried and (run.dtype.itemsize > 2 or not one.not_16_bit):
                with case(law=law):
                    one.check(subject, run)

    require_of_runs(name, 2, subject.shapes(SHAPES), REAL_DTYPES, check)


BY_DTYPE = [list(TABLE)[place :: len(REAL_DTYPES)] for place in range(len(REAL_DTYPES))]
GROUPS = [names[at : at + 8] for names in BY_DTYPE for at in range(0, len(names), 8)]
"""Chains that one graph steps: as many as a run has names for leaves, in one dtype."""


COMMON = {"maximize", "weight_decay", "decoupled_weight_decay"}
"""Names of the stages that stand before most rules."""


def without(traced: set[str], optimizer: Optimizer) -> Optimizer:
    """Return a chain without the common stages that the same graph has in an earlier chain."""
    if optimizer.is_composed:
        return optimizer
    kept = [link for link in optimizer.links if link.stage.name not in traced]
    traced |= {link.stage.name for link in kept} & COMMON
    return chain(*kept)


def partition_of(names: list[str], leaves: int) -> tuple[Subject, Run]:
    """Return a partition in which each chain steps leaves of its own, and a run of all leaves.

    With several leaves of a chain, some gradients are missing.
    """
    chosen = [TABLE[name] for name in names]
    dtype = REAL_DTYPES[list(TABLE).index(names[0]) % len(REAL_DTYPES)]
    steps = max((one.max_steps for one in chosen if one.max_steps > MAX_STEPS), default=2)
    sizes: dict[str, Any] = {"leaves": leaves, "steps": steps, "missing": leaves > 1}
    runs = [
        seeded_run(name, dtype, 0, one.subject().shapes(NON_EMPTY), **sizes)
        for name, one in zip(names, chosen, strict=True)
    ]
    merged = Run(
        (),
        dtype,
        tuple(leaf for run in runs for leaf in run.leaves),
        tuple(sum(grads, ()) for grads in zip(*(run.steps[:steps] for run in runs), strict=True)),
    )
    part_of = {path: f"part_{k // leaves}" for k, path in enumerate(merged.names)}

    def factory() -> Optimizer:
        parts: dict[str, Optimizer] = {}
        traced: set[str] = set()
        for k, (one, run) in enumerate(zip(chosen, runs, strict=True)):
            parts[f"part_{k}"] = without(traced, one.factory(**run.kwargs))
        return partition(parts, lambda path, shape: part_of[path[0]])

    return Subject(factory), merged


@pytest.mark.parametrize("group", [*range(len(GROUPS)), "missing gradients"])
def test_traced_is_close(group: int | str) -> None:
    """A step inside torch.compile matches a step outside, as one graph.

    Tracing takes a second for each optimizer, and half as much for each part of a partition. A
    graph has the common stages once. Two chains have two leaves and missing gradients. If
    everything is tested, each chain is also traced alone, and every fourth has several leaves.
    """
    law = LAWS["traced is close"]
    names = list(TABLE)[::36][:2] if isinstance(group, str) else GROUPS[group]
    subject, run = partition_of(names, 2 if isinstance(group, str) else 1)
    with case(names=names, run=run):
        law.check(subject, run)
    for name in names if EVERYTHING else ():
        alone, several = TABLE[name].subject(), list(TABLE).index(name) % 4 == 0
        require_of_runs(
            name,
            1,
            alone.shapes(NON_EMPTY),
            REAL_DTYPES,
            lambda run, alone=alone: law.check(alone, run),  # type: ignore[misc]
            leaves=1 + several,
            missing=several,
        )
