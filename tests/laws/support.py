"""Choice of laws for each chain, dtype and storage, and the runs that check them."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_optim.kernels import ExecutorName
from functional_optim.testing import CASES, CHAINS, INPUT_CASES, LAWS, check_law
from functional_optim.testing.combinations import STORAGES, stored_subject, why_not
from functional_optim.testing.runs import REAL_DTYPES, SMALL_SHAPES, WIDE_SHAPE, Run, runs
from functional_optim.testing.storage_laws import stored_is_bounded

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

OWN = ("pure", "in place")
"""Laws that are checked for each executor."""

OF_VALUES = (
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

BLOCKS = ((), (3,), (0, 2), (256,), (300,), (2, 300))
"""Shapes of one block of an 8-bit code, of less, and of more."""


def drawn(number: int, strategy: st.SearchStrategy[Run], check: Callable[[Run], None]) -> None:
    """Search random runs for one that fails."""

    def property_(run: Run) -> None:
        with case(run=run):
            check(run)

    examples(number, report_multiple_bugs=False)(given(strategy)(property_))()


def dtypes_of(law: str, turn: int) -> list[torch.dtype]:
    """Return the dtypes to check a law in: one by turns, or all if everything is tested."""
    one = LAWS[law]
    if one.complex_only or one.double_only:
        return [torch.complex64 if one.complex_only else torch.float64]
    real = [dtype for dtype in REAL_DTYPES if dtype.itemsize > 2 or not one.not_16_bit]
    return real if EVERYTHING else [real[(turn + list(LAWS).index(law)) % len(real)]]


def require_laws(name: str, number: int) -> None:
    """Check all quick laws of a chain, on a few runs of small tensors."""
    subject, turn = TABLE[name].subject(), list(TABLE).index(name)
    laws = [law for law in QUICK if LAWS[law].concerns(subject)]

    def all_laws(run: Run) -> None:
        wide = subject.matrices and any(leaf.shape == WIDE_SHAPE for leaf in run.leaves)
        for law in laws:
            if wide and LAWS[law].small_only:
                continue
            for dtype in dtypes_of(law, turn):
                with case(law=law, dtype=dtype):
                    LAWS[law].check(subject, replace(run, dtype=dtype))

    # A run in a real dtype takes its numbers from the complex run.
    shapes = (*SMALL_SHAPES, (1, 2, 1, 2), WIDE_SHAPE)
    shapes = subject.shapes(shapes)
    complex_runs = runs(
        subject.options,
        (torch.complex64,),
        max_steps=subject.max_steps,
        large=False,
        shapes=shapes,
    )
    drawn(number, complex_runs, all_laws)


def require_some_laws(name: str, laws: Sequence[str], number: int) -> None:
    """Check some laws of a chain with :func:`check_law`."""
    for law in laws:
        dtypes = dtypes_of(law, list(TABLE).index(name))
        with case(law=law, dtypes=dtypes):
            check_law(
                law,
                replace(TABLE[name].subject(), dtypes=tuple(dtypes)),
                max_examples=examples(number).max_examples,
                derandomize=not EVERYTHING,
            )


@functools.cache
def possible_storages(name: str, executor: ExecutorName) -> list[str]:
    """Return the storages in which an executor can run a chain."""
    chain = TABLE[name].factory()
    return [one for one in STORAGES if why_not(chain, one, executor) is None]


def require_combination(name: str, storage: str, executor: ExecutorName, number: int) -> None:
    """Check all laws of a chain in one storage with one executor."""
    subject = TABLE[name].subject()
    options = subject.options
    plain = replace(subject, oracle=None, options=options, dtypes=(torch.float32,))
    reference = stored_subject(plain, storage)
    own = stored_subject(plain, storage, executor)
    checks: list[tuple[str, Callable[[Run], None]]] = [
        *((law, lambda run, law=law: LAWS[law].check(own, run)) for law in OWN),
        *(
            (law, lambda run, law=law: LAWS[law].check(reference, run))
            for law in AS_REFERENCE.get(executor, OF_VALUES if executor == "reference" else ())
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
    drawn(
        number, runs(options, reference.dtypes, max_steps=3, large=False, shapes=shapes), all_laws
    )
