"""Which law is tried with which chain, dtype and storage."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_optim.executors import ExecutorName
from functional_optim.testing import CASES, CHAINS, LAWS, Subject, check_law
from functional_optim.testing.combinations import STORAGES, possible_executors, stored_subject
from functional_optim.testing.executor_laws import fused_is_close
from functional_optim.testing.runs import REAL_DTYPES, Run, runs
from functional_optim.testing.storage_laws import stored_is_bounded

from ..choices import EVERYTHING, case, examples

TABLE = {**CASES, **CHAINS}

COMPILED = (
    "script is reference",
    "program is reference",
    "auto is reference",
    "compiled is reference",
    "traced is close",
)
"""Laws for which something is compiled."""

PURE = tuple(law for law in LAWS if law not in COMPILED)

OWN = ("pure", "in place")
"""Laws of a chain as an executor runs it."""

OF_VALUES = (
    "any split by leaves",
    "any split by elements",
    "any filling",
    "one step each",
    "any moment",
    "contained",
)
"""Laws of what it computes: for executors that are the reference bit for bit, asked of that."""

AS_REFERENCE: dict[str, tuple[str, ...]] = {
    "script": ("script is reference", "program is reference"),
    "blocked": ("blocked is reference", "bound is reference"),
    "auto": ("auto is reference",),
    "compile": ("compiled is reference",),
}
"""Laws that hold an executor against the reference."""

SHAPES = ((), (3,), (0, 2), (256,), (300,), (2, 300))
"""Of a block of an 8-bit code, of less and of more."""


def require_laws(name: str, laws: Sequence[str], number: int, *, turn: int = 0) -> None:
    """Some laws of a chain, each in one dtype or another; with everything tried, in all.

    Args:
        name: of the chain, in ``TABLE``.
        laws: their names.
        number: of examples.
        turn: in which dtype to begin.
    """
    subject = TABLE[name].subject()
    for law in laws:
        dtypes = [dtype for dtype in REAL_DTYPES if dtype.itemsize > 2 or not LAWS[law].not_16_bit]
        if not EVERYTHING:
            place = list(TABLE).index(name) + list(LAWS).index(law) + turn
            dtypes = [dtypes[place % len(dtypes)]]
        with case(law=law, dtypes=dtypes):
            check_law(
                law,
                replace(subject, dtypes=tuple(dtypes)),
                max_examples=examples(number).max_examples,
                derandomize=not EVERYTHING,
            )


def possible_storages(name: str, executor: ExecutorName) -> list[str]:
    """The storages in which an executor can run a chain."""
    chain = TABLE[name].factory()
    return [one for one in STORAGES if executor in possible_executors(chain, one)]


def require_combination(name: str, storage: str, executor: ExecutorName, number: int) -> None:
    """All laws of a chain in a storage, run by an executor."""
    subject = TABLE[name].subject()
    # Of some options, torch has no fused kernel.
    options: Any = st.just({}) if executor == "fused" else subject.options
    plain = Subject(subject.factory, options=options, dtypes=(torch.float32,))
    reference = stored_subject(plain, storage)
    own = stored_subject(plain, storage, executor)
    strategy = runs(options, reference.dtypes, max_steps=3, large=False, shapes=SHAPES)

    def all_laws(run: Run) -> None:
        checks = [(law, LAWS[law].check, own) for law in OWN]
        checks += [(law, LAWS[law].check, own) for law in OF_VALUES if executor == "reference"]
        checks += [(law, LAWS[law].check, reference) for law in AS_REFERENCE.get(executor, ())]
        for law, check, of in checks:
            with case(law=law, run=run):
                check(of, run)
        with case(law="a bound", run=run):
            if executor == "fused":
                fused_is_close(reference, run)
            if executor == "reference" and STORAGES[storage]:
                stored_is_bounded(plain, reference, run)

    with case(storage=storage, executor=executor):
        examples(number, report_multiple_bugs=False)(given(strategy)(all_laws))()
