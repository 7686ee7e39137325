"""Steps with Python's numbers, which CUDA graphs cannot capture: a replay would repeat one step."""

import pytest
import torch

from functional_optim import adamw
from functional_optim.core import graph_capture
from functional_optim.kernels import ExecutorName
from tests.choices import each_value

from .support import IN_PYTHON


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate that parameters are on a CUDA device whose work is being captured."""
    monkeypatch.setattr(graph_capture, "_IS_CUDA", lambda _: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


@pytest.mark.usefixtures("captured")
@each_value(executor=["auto", *IN_PYTHON])
def test_a_step_says_so_before_anything_is_changed(executor: ExecutorName) -> None:
    optimizer = adamw(0.1).using(executor=executor)
    params, grads = torch.ones(3), torch.ones(3)
    state = optimizer.init(params)
    bound = optimizer.bind(torch.ones(3))
    bound._uncaptured = [bound.params]
    calls = {
        "update": lambda: optimizer.update(params, grads, state),
        "update_": lambda: optimizer.update_(params, grads, state),
        "bound": lambda: bound.step(bound.gradients),
        "bound, elsewhere": lambda: bound.step(grads),
    }
    for call in calls.values():
        with pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
            call()
    assert torch.equal(params, torch.ones(3)) and torch.equal(bound.params, torch.ones(3))
    assert int(state.leaves.step) == int(bound.state.leaves.step) == 0


def test_on_the_cpu_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: 1 / 0)
    optimizer = adamw(0.1)
    optimizer.update_(torch.ones(3), torch.ones(3), optimizer.init(torch.ones(3)))
    optimizer.bind(torch.ones(3)).step(torch.ones(3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_step_is_an_error_on_the_device() -> None:
    params, grads = torch.ones(3, device="cuda"), torch.ones(3, device="cuda")
    bound = adamw(0.1).using(executor="blocked").bind(params)
    bound.step(grads)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        params.add_(1.0)  # torch warns about a graph without operations
        with pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
            bound.step(grads)
