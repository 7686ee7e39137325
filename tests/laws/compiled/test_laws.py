"""The laws of executors that compile, over every case: few runs, since each may be compiled."""

import pytest

from ..support import SLOW, TABLE, require_some_laws


@pytest.mark.parametrize("name", TABLE)
def test_slow_laws(name: str) -> None:
    require_some_laws(name, SLOW, 2)


@pytest.mark.parametrize("name", TABLE)
def test_compiled_is_reference(name: str) -> None:
    """Loops in C++, asked for and picked; and TorchScript."""
    require_some_laws(name, ["script is reference", "program is reference"], 4)
    require_some_laws(name, ["compiled is reference", "auto is reference"], 4)


@pytest.mark.parametrize("name", TABLE)
def test_traced_is_close(name: str) -> None:
    """Inside torch.compile, as one graph, a step is the same."""
    require_some_laws(name, ["traced is close"], 1)
