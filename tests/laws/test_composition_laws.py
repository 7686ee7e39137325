"""Laws that relate two optimizers, for every wrapper, alone and in pairs."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from functional_optim import (
    Link,
    Optimizer,
    accumulate,
    adamw,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    dadapt_adam,
    dadapt_sgd,
    dog,
    ema,
    lookahead,
    on_global_step,
    prodigy,
    sam,
    schedule_free_sgd,
    sgd,
)
from functional_optim.schedules import linear
from functional_optim.testing import LAWS, Subject, runs
from functional_optim.testing.runs import REAL_DTYPES, SMALL_SHAPES, Run

from ..choices import EVERYTHING, case
from .support import drawn

WRAPPERS: dict[str, Callable[[Any], Optimizer]] = {
    "accumulate": lambda inner: chain(accumulate(2), inner),
    "apply_if_finite": lambda inner: chain(apply_if_finite(9), inner),
    "sam": lambda inner: chain(sam(0.1), inner),
    "clip": lambda inner: chain(clip_by_global_norm(0.5), inner),
    "ema": lambda inner: chain(inner, ema(0.9)),
    "lookahead": lambda inner: chain(inner, lookahead(2)),
}
INNER: dict[str, Callable[[], Optimizer | Link]] = {
    "sgd": lambda: sgd(0.1, momentum=0.9),
    "adamw": lambda: adamw(0.1),
    "schedule_free": lambda: schedule_free_sgd(0.1, warmup_steps=2),
    "prodigy": lambda: prodigy(d0=0.01),
    "dadapt_adam": lambda: dadapt_adam(d0=0.01),
    "dadapt_sgd": lambda: dadapt_sgd(d0=0.01, momentum=0.5),
    "dog": lambda: dog(reps_rel=0.1),
    "global step": lambda: sgd(on_global_step(linear(0.1, to=0.0, steps=3))),
    "schedule_free at a global step": lambda: schedule_free_sgd(
        on_global_step(linear(0.1, to=0.01, steps=3))
    ),
}
PAIRS = [(name,) for name in WRAPPERS] + list(itertools.product(WRAPPERS, WRAPPERS))
RELATIONS = ("accumulation", "skipping", "partition", "masking", "freezing", "groups")


def subject_of(wrappers: tuple[str, ...], inner: str) -> Subject:
    def made() -> Optimizer:
        found: Any = INNER[inner]()
        for name in reversed(wrappers):
            found = WRAPPERS[name](found)
        return found

    return Subject(made, dtypes=(torch.float32, torch.float64))


@pytest.mark.parametrize("wrappers", PAIRS, ids=" ".join)
def test_wrappers_in_pairs_obey_the_laws_of_composition(wrappers: tuple[str, ...]) -> None:
    """Pairs of wrappers obey the laws of composition (faults 1 and 3).

    In particular, stages after a closed gate do not run and count no step. Each law is checked on
    every second run, unless everything is tested.
    """
    inner = list(INNER) if EVERYTHING else [list(INNER)[PAIRS.index(wrappers) % len(INNER)]]
    for name in inner:
        subject, places = subject_of(wrappers, name), itertools.count()

        def obeys(run: Run, subject: Subject = subject, places: Iterator[int] = places) -> None:
            place = next(places)
            for number, law in enumerate((*RELATIONS, "front-ends", "in place", "pure")):
                if not EVERYTHING and (place + number // 2) % 2:
                    continue
                dtype = REAL_DTYPES[number % 2]
                with case(law=law, dtype=dtype):
                    LAWS[law].check(subject, replace(run, dtype=dtype))

        with case(inner=name):
            drawn(4, runs(subject.options, large=False, shapes=SMALL_SHAPES), obeys)
