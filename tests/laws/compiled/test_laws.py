"""Laws of executors that compile, for every case. Few runs suffice, since each may compile."""

import pytest

from functional_optim.testing import LAWS
from functional_optim.testing.runs import REAL_DTYPES, SMALL_SHAPES, Run

from ...choices import EVERYTHING, case
from ..support import SLOW, TABLE, require_of_runs

SHAPES = ((300,), *SMALL_SHAPES, (1, 2, 1, 2))
"""The first shape is more than one block of a compiled loop."""
NON_EMPTY = ((2, 3), (), (3,), (1, 2, 1, 2))


@pytest.mark.parametrize("name", TABLE)
def test_laws_of_compiled_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled C++ loops, requested or automatic, and TorchScript match the reference.

    The laws share their runs, so that each loop is compiled once. So do the slow laws.
    """
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 64)
    subject = TABLE[name].subject()
    laws = ("script is reference", "compiled is reference", "auto is reference", *SLOW)
    known = {law: LAWS[law] for law in laws if LAWS[law].concerns(subject)}

    def check(run: Run) -> None:
        for law, one in known.items():
            if run.dtype.itemsize > 2 or not one.not_16_bit:
                with case(law=law):
                    one.check(subject, run)

    require_of_runs(name, 2, subject.shapes(SHAPES), REAL_DTYPES, check)


@pytest.mark.parametrize("name", TABLE)
def test_traced_is_close(name: str) -> None:
    """A step inside torch.compile matches a step outside, as one graph.

    Tracing takes half a second for each leaf, and for each new set of missing gradients. So most
    algorithms have one leaf with all gradients. Every twelfth has two leaves and missing gradients,
    and every fourth if everything is tested.
    """
    law, subject = LAWS["traced is close"], TABLE[name].subject()
    several = list(TABLE).index(name) % (4 if EVERYTHING else 12) == 0
    require_of_runs(
        name,
        1,
        subject.shapes(NON_EMPTY),
        REAL_DTYPES,
        lambda run: law.check(subject, run),
        leaves=1 + several,
        missing=several,
    )
