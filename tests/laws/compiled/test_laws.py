"""The laws of executors that compile, over every case: few runs, since each may be compiled."""

import pytest

from functional_optim.testing import LAWS
from functional_optim.testing.runs import Run, runs
from tests.choices import EVERYTHING

from ..support import SLOW, TABLE, drawn, dtypes_of, require_some_laws


@pytest.mark.parametrize("name", TABLE)
def test_slow_laws(name: str) -> None:
    require_some_laws(name, SLOW, 1)


@pytest.mark.parametrize("name", TABLE)
def test_compiled_is_reference(name: str) -> None:
    """Loops in C++, asked for and picked; and TorchScript."""
    require_some_laws(name, ["script is reference"], 2)
    require_some_laws(name, ["compiled is reference", "auto is reference"], 2)


@pytest.mark.parametrize("name", TABLE)
def test_traced_is_close(name: str) -> None:
    """Inside torch.compile, as one graph, a step is the same.

    Tracing takes a second, so one run is tried, and not the simplest: two leaves and several steps.
    Each other choice of gradients that are None is traced anew. So of the runs that are drawn, it
    is one with few of them; for one algorithm of four, one with two.
    """
    law, subject = "traced is close", TABLE[name].subject()
    if not LAWS[law].concerns(subject):
        return
    tried: list[tuple[int, Run]] = []

    def check(run: Run) -> None:
        choices = len({tuple(grad is None for grad in step) for step in run.steps})
        if EVERYTHING:
            LAWS[law].check(subject, run)
        if len(run.leaves) == 2 and len(run.steps) > 1 and choices <= 2:
            tried.append((choices, run))

    dtypes = tuple(dtypes_of(law, list(TABLE).index(name)))
    drawn(60, runs(subject.options, dtypes, large=False, shapes=subject.shapes()), check)
    assert tried
    if not EVERYTHING:
        several = list(TABLE).index(name) % 4 == 0
        _, run = (max if several else min)(tried, key=lambda one: one[0])
        LAWS[law].check(subject, run)
