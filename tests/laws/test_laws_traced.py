"""The law of the traced step, over every case: each run is traced anew, so there are few."""

import pytest

from functional_optim.testing import CASES, CHAINS, check_law

TABLE = {**CASES, **CHAINS}


@pytest.mark.parametrize("name", TABLE)
def test_traced_is_close(name: str) -> None:
    """Inside torch.compile, as one graph, a step is the same (fault 1)."""
    check_law("traced is close", TABLE[name].subject(), max_examples=2)
