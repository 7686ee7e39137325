"""What the tests of the executors share."""

import pytest

from functional_optim import capturable
from functional_optim.executors.inductor import InductorKernel
from functional_optim.executors.lane_executor import LaneExecutor


@pytest.fixture
def captured_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that may be captured are compiled here as on CUDA, but into torch's own operations."""
    kernel = InductorKernel(on_device=True, devices=("cpu",), backend="aot_eager")
    for name in ("auto", "compile"):
        executor = LaneExecutor(kernel, captured=True)
        monkeypatch.setitem(capturable._EXECUTORS, name, executor)
