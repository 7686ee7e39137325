"""The laws of executors that compile, over every case: few runs, since each may be compiled."""

import pytest

from functional_optim.testing import LAWS
from functional_optim.testing.runs import Run, runs
from tests.choices import EVERYTHING

from ..support import SLOW, TABLE, drawn, dtypes_of, require_some_laws


@pytest.mark.parametrize("name", TABLE)
def test_slow_laws(name: str) -> None:
    require_some_laws(name, SLOW, 2)


@pytest.mark.parametrize("name", TABLE)
def test_compiled_is_reference(name: str) -> None:
    """Loops in C++, asked for and picked; and TorchScript."""
    require_some_laws(name, ["script is reference"], 4)
    require_some_laws(name, ["compiled is reference", "auto is reference"], 4)


@pytest.mark.parametrize("name", TABLE)
def test_traced_is_close(name: str) -> None:
    """Inside torch.compile, as one graph, a step is the same.

    Tracing takes a second, so one run is tried, and not the simplest: of several leaves and steps.
    """
    law, subject = "traced is close", TABLE[name].subject()
    if not LAWS[law].concerns(subject):
        return
    tried: list[Run] = []

    def check(run: Run) -> None:
        several = len(run.leaves) > 1 and len(run.steps) > 1
        if EVERYTHING or (several and tried in ([], [run])):
            tried[:] = [run]
            LAWS[law].check(subject, run)

    dtypes = tuple(dtypes_of(law, list(TABLE).index(name)))
    drawn(12, runs(subject.options, dtypes, large=False, shapes=subject.shapes()), check)
    assert tried
