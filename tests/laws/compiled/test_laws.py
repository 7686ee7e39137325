"""Laws of executors that compile, for every case. Few runs suffice, since each may compile."""

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
    """Compiled C++ loops match the reference, requested or automatic, and so does TorchScript."""
    require_some_laws(name, ["script is reference"], 2)
    require_some_laws(name, ["compiled is reference", "auto is reference"], 2)


@pytest.mark.parametrize("name", TABLE)
def test_traced_is_close(name: str) -> None:
    """A step inside torch.compile matches a step outside, as one graph.

    Tracing takes a second, so the test checks one run with two leaves and several steps. Each new
    pattern of missing gradients is traced again. So the run has few patterns: one for most
    algorithms, up to two for every fourth.
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
