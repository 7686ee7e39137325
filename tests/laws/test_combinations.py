"""Every law over every combination of algorithm, storage and executor that is declared possible.

No test here names an algorithm. What is declared impossible is refused, and nothing else is.
"""

from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from functional_optim import Optimizer
from functional_optim.executors import ExecutorName
from functional_optim.storage import PARAM_STORAGES, STATE_STORAGES, stored
from functional_optim.testing import CASES, CHAINS, LAWS, Subject, runs
from functional_optim.testing.combinations import (
    STORAGES,
    possible_executors,
    stored_subject,
    why_not,
)
from functional_optim.testing.executor_laws import fused_is_close
from functional_optim.testing.runs import Run
from functional_optim.testing.storage_laws import stored_is_bounded

TABLE = {**CASES, **CHAINS}
SHAPES = ((), (3,), (0, 2), (256,), (300,), (2, 300))
"""Of a block of an 8-bit code, of less and of more."""

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

COUNT = 512


def refusal(optimizer: Optimizer, storage: str, executor: ExecutorName) -> str | None:
    """What the code says to a combination; None where it runs it."""
    try:
        made = stored(optimizer, **STORAGES[storage]).using(executor=executor)
    except ValueError as error:
        return str(error)
    dtype = PARAM_STORAGES[STORAGES[storage].get("param", "float32")].dtype
    param = torch.linspace(-1, 1, COUNT).to(dtype)
    try:
        made.update(param, param.clone(), made.init(param))
        said = made.explain(param).partition(": ")[2]
    except (TypeError, ValueError) as error:
        return str(error)
    handed_on = executor != "reference" and said.startswith(("reference", "one by one"))
    return said if handed_on else None


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", TABLE)
def test_what_is_declared_is_what_the_code_does(name: str, storage: str) -> None:
    optimizer = TABLE[name].factory()
    for executor in get_args(ExecutorName):
        declared = why_not(optimizer, storage, executor)
        found = refusal(optimizer, storage, executor)
        assert (declared is None) == (found is None), f"{executor}: {declared!r}, {found!r}"


def test_every_storage_is_in_some_combination() -> None:
    params = {one.get("param", "float32") for one in STORAGES.values()}
    assert params == set(PARAM_STORAGES)
    assert {one.get("state", "float32") for one in STORAGES.values()} == set(STATE_STORAGES)


@pytest.mark.parametrize(("storage", "executor"), [("float16", "blocked"), ("float32", "fast")])
def test_unknown_names_are_refused(storage: str, executor: str) -> None:
    with pytest.raises(ValueError, match=r"must be one of '.*got '(float16|fast)'"):
        why_not(CASES["sgd"].factory(), storage, executor)


def laws_of(storage: str, executor: ExecutorName) -> list[Any]:
    """The laws that a combination has to obey, as pairs (name, check of a subject and a run)."""
    names: tuple[str, ...] = OWN
    if executor == "reference":
        names += OF_VALUES
    return [(law, LAWS[law].check) for law in names]


def check(subject: Subject, storage: str, executor: ExecutorName, *, examples: int) -> None:
    """All laws of a combination over a few runs."""
    # Of some options, torch has no fused kernel.
    options = st.just({}) if executor == "fused" else subject.options
    plain = Subject(subject.factory, options=options, dtypes=(torch.float32,))
    reference = stored_subject(plain, storage)
    own = stored_subject(plain, storage, executor)

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
    )
    @given(runs(options, reference.dtypes, max_steps=3, large=False, shapes=SHAPES))
    def all_laws(run: Run) -> None:
        for law, law_check in laws_of(storage, executor):
            with_note(law, lambda c=law_check: c(own, run), run)
        for law in AS_REFERENCE.get(executor, ()):
            with_note(law, lambda c=LAWS[law].check: c(reference, run), run)
        if executor == "fused":
            with_note("fused is close", lambda: fused_is_close(reference, run), run)
        if executor == "reference" and STORAGES[storage]:
            with_note("stored is bounded", lambda: stored_is_bounded(plain, reference, run), run)

    all_laws()


def with_note(law: str, law_check: Any, run: Run) -> None:
    try:
        law_check()
    except Exception as error:
        error.add_note(f"the law {law!r} is broken by\n{run}")
        raise


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", TABLE)
def test_laws(name: str, storage: str) -> None:
    subject = TABLE[name].subject()
    for executor in possible_executors(subject.factory(), storage):
        check(subject, storage, executor, examples=2)
