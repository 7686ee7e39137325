"""Choice of laws for each chain, dtype and storage, and the runs that check them."""

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_optim.kernels import ExecutorName
from functional_optim.storage import PARAM_STORAGES
from functional_optim.testing import LAWS, LeafSpec, Values
from functional_optim.testing.runs import (
    LAYOUTS,
    MAX_STEPS,
    REAL_DTYPES,
    SMALL_SHAPES,
    WIDE_SHAPE,
    Run,
    Shape,
    runs,
)
from tests.cases import CASES, CHAINS, INPUT_CASES
from tests.laws.combinations import STORAGES, stored_subject, why_not
from tests.laws.storage_laws import stored_is_bounded

from ..choices import EVERYTHING, case, examples

TABLE = {**CASES, **CHAINS, **INPUT_CASES}

COMPILED = (
    "script is reference",
    "auto is reference",
    "compiled is reference",
    "traced is close",
)
"""Laws that compile something."""

SLOW = ("one result", "capturable is close")
"""Laws whose runs take a tenth of a second each."""

QUICK = tuple(law for law in LAWS if law not in COMPILED + SLOW)

OF_VALUES = (
    "in place",
    "any split by leaves",
    "any split by elements",
    "one step each",
    "any moment",
    "contained",
)
"""Laws of the computed values: checked on the reference if the executor equals it in every bit."""

AS_REFERENCE: dict[str, tuple[str, ...]] = {
    "blocked": ("blocked is reference", "bound is reference"),
    "auto": ("auto is reference",),
}
"""Laws that compare an executor with the reference."""

BLOCKS = ((300,), (), (3,), (0, 2), (256,), (2, 300))
"""Shapes of one block of an 8-bit code, of less, and of more."""


def drawn(number: int, strategy: st.SearchStrategy[Run], check: Callable[[Run], None]) -> None:
    """Search random runs for one that fails."""

    def property_(run: Run) -> None:
        with case(run=run):
            check(run)

    examples(number, report_multiple_bugs=False)(given(strategy)(property_))()


SPECIAL = (0.0, -0.0, 1e-4, -1e-4, 1e-8, -1e-8)


@functools.cache
def options_of(name: str) -> list[tuple[tuple[str, Any], ...]]:
    """Return several options of a chain, the same in every run of the tests."""
    found: list[tuple[tuple[str, Any], ...]] = []

    def collect(options: dict[str, Any]) -> None:
        found.append(tuple(sorted(options.items())))

    fixed = settings(examples(8), derandomize=True, database=None)
    fixed(given(TABLE[name].subject().options)(collect))()
    return found


def seeded_run(
    name: str,
    dtype: torch.dtype,
    seed: int,
    shapes: tuple[Shape, ...],
    *,
    leaves: int = 2,
    steps: int = 2,
    missing: bool = True,
) -> Run:
    """Return a run with ordinary numbers for a chain, the same in every run of the tests.

    Hypothesis begins with the simplest run, a number that is 0 and has no gradient. Most laws hold
    for that run whatever the optimizer does.

    Args:
        name: of the chain.
        dtype: of the parameters.
        seed: chooses options, shapes, layouts and numbers.
        shapes: shapes to choose from. The first leaf has the first shape, the other leaves any.
        leaves: number of parameters.
        steps: number of steps, unless the chain needs more to show all that it does.
        missing: True if a quarter of the gradients are missing. The first one is not.
    """
    draws = random.Random(f"{name}, {seed}")
    found = [
        LeafSpec(shape, draws.choice(LAYOUTS), values_of(draws, shape))
        for shape in (shapes[0], *draws.choices(shapes, k=leaves - 1))
    ]
    all_grads = tuple(
        tuple(
            None
            if missing and (number, k) != (0, 0) and draws.random() < 0.25
            else values_of(draws, leaf.shape)
            for k, leaf in enumerate(found)
        )
        for number in range(steps if TABLE[name].max_steps <= MAX_STEPS else TABLE[name].max_steps)
    )
    options = options_of(name)
    return Run(options[(1 + seed) % len(options)], dtype, tuple(found), all_grads)


def values_of(draws: random.Random, shape: Shape) -> Values:
    """Return numbers of both signs, some of them zero or tiny, for a tensor of any dtype."""
    count = torch.Size(shape).numel()
    if count > 16:
        return Values((), draws.randrange(1000))
    twice = range(2 * count)  # real and imaginary parts
    return Values(
        tuple(
            draws.choice(SPECIAL) if draws.random() < 0.25 else draws.uniform(-8.0, 8.0)
            for _ in twice
        )
    )


def require_of_runs(
    name: str,
    number: int,
    shapes: tuple[Shape, ...],
    dtypes: tuple[torch.dtype, ...],
    check: Callable[[Run], None],
    **sizes: Any,
) -> None:
    """Check a few seeded runs of a chain, or search many drawn runs if everything is tested.

    Args:
        name: of the chain.
        number: number of seeded runs.
        shapes: of the parameters; the first leaf of a seeded run has the first shape.
        dtypes: of the parameters, by turns.
        check: raises an error if a run breaks a law.
        sizes: arguments of :func:`seeded_run`.
    """
    turn = list(TABLE).index(name)
    for seed in range(number):
        run = seeded_run(name, dtypes[(turn + seed) % len(dtypes)], seed, shapes, **sizes)
        with case(run=run):
            check(run)
    if EVERYTHING:
        subject = TABLE[name].subject()
        max_steps = subject.max_steps
        of_shapes = runs(subject.options, dtypes, max_steps=max_steps, large=False, shapes=shapes)
        drawn(number, of_shapes, check)


def dtypes_of(law: str, turn: int) -> list[torch.dtype]:
    """Return the dtypes to check a law in: one by turns, or all if everything is tested."""
    one = LAWS[law]
    if one.complex_only or one.double_only:
        return [torch.complex64 if one.complex_only else torch.float64]
    real = [dtype for dtype in REAL_DTYPES if dtype.itemsize > 2 or not one.not_16_bit]
    return real if EVERYTHING else [real[(turn + list(LAWS).index(law)) % len(real)]]


def require_laws(name: str, number: int) -> None:
    """Check all quick laws of a chain, on a few runs of small tensors.

    Each law is checked on every second run of a chain, and on the other runs of the next chain. If
    everything is tested, each law is checked on every run.
    """
    subject, turn = TABLE[name].subject(), list(TABLE).index(name)
    laws = [law for law in QUICK if LAWS[law].concerns(subject)]
    places = itertools.count()

    def all_laws(run: Run) -> None:
        wide = subject.matrices and any(leaf.shape == WIDE_SHAPE for leaf in run.leaves)
        place = next(places)
        for law in laws:
            is_limited = subject.matrices and LAWS[law].small_only  # the run may be a wide one
            has_turn = EVERYTHING or is_limited or (turn + QUICK.index(law) + place) % 2 == 0
            if not has_turn or (wide and is_limited):
                continue
            for dtype in dtypes_of(law, turn):
                with case(law=law, dtype=dtype):
                    LAWS[law].check(subject, replace(run, dtype=dtype))

    # A run in a real dtype takes its numbers from the complex run.
    shapes = subject.shapes(((3,), *SMALL_SHAPES, (1, 2, 1, 2), WIDE_SHAPE))
    require_of_runs(name, number, shapes, (torch.complex64,), all_laws)


@functools.cache
def possible_storages(name: str, executor: ExecutorName) -> list[str]:
    """Return the storages in which an executor can run a chain."""
    chain = TABLE[name].factory()
    return [one for one in STORAGES if why_not(chain, one, executor) is None]


def require_combination(name: str, storage: str, executor: ExecutorName, number: int) -> None:
    """Check the laws of a chain in one storage with one executor.

    Of the laws of values, every second one is checked, and the others in the next storage of
    parameters. If everything is tested, all are checked.
    """
    param = STORAGES[storage].get("param", "float32")
    turn = list(TABLE).index(name) + list(PARAM_STORAGES).index(param)
    of_values = OF_VALUES if EVERYTHING else OF_VALUES[turn % 2 :: 2]
    subject = TABLE[name].subject()
    options = subject.options
    plain = replace(subject, oracle=None, options=options, dtypes=(torch.float32,))
    reference = stored_subject(plain, storage)
    own = stored_subject(plain, storage, executor)
    checks: list[tuple[str, Callable[[Run], None]]] = [
        ("pure", lambda run: LAWS["pure"].check(own, run)),
        *(
            (law, lambda run, law=law: LAWS[law].check(reference, run))
            for law in AS_REFERENCE.get(executor, of_values if executor == "reference" else ())
            if LAWS[law].concerns(reference)
        ),
    ]
    if executor == "reference" and STORAGES[storage]:
        checks.append(("bounded", lambda run: stored_is_bounded(plain, reference, run)))

    def all_laws(run: Run) -> None:
        for law, check in checks:
            with case(law=law, storage=storage, executor=executor):
                check(run)

    shapes = subject.shapes(BLOCKS)
    require_of_runs(name, number, shapes, reference.dtypes, all_laws)
