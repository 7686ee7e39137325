"""Fixtures for the tests of executors."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import functional_optim
from functional_optim.kernels import EXECUTORS, KernelExecutor, chunks
from functional_optim.kernels.inductor import InductorKernel
from functional_optim.kernels.pieces import PIECE_VARIABLE
from functional_optim.plan import tree_steps
from functional_optim.plan.guard import mask_of
from functional_optim.plan.plain_steps import PlainSteps

HOME = str(Path(functional_optim.__file__).parent)


@pytest.fixture
def near_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the sizes of chunks, pieces, and loops, so that small tests reach them."""
    monkeypatch.setattr(chunks, "LARGE", 512)
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 512)
    monkeypatch.setenv(PIECE_VARIABLE, "256")


@pytest.fixture
def executors(near_borders: None, with_loops: None) -> tuple[str, ...]:
    """Return the names of exact executors that compile; plain/ overrides this fixture."""
    return "compiled", "auto"


class _Planned(list[Any]):
    """List of new plans. ``clear`` also deletes the plans of all trees."""

    def clear(self) -> None:
        super().clear()
        tree_steps._PLANS.clear()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record which leaves have gradients, for each new plan of a plain step."""
    made = _Planned()
    made.clear()
    before = PlainSteps._plan

    def noted(self: PlainSteps, run: Any, rows: Any, every: Any) -> Any:
        made.append(mask_of(every[-len(self._options.numbers) :]))
        return before(self, run, rows, every)

    monkeypatch.setattr(PlainSteps, "_plan", noted)
    return made


@pytest.fixture
def calls() -> Iterator[Callable[[Callable[[], object]], list[str]]]:
    """Yield a function that lists the package's Python functions that a call runs."""

    def of(call: Callable[[], object]) -> list[str]:
        found: list[str] = []

        def note(frame: Any, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(HOME):
                found.append(frame.f_code.co_qualname)

        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
        return found

    yield of
    sys.setprofile(None)


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Make Python switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def captured_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile capturable steps on the CPU as on CUDA, but into torch's own operations."""
    kernel = InductorKernel(devices=("cpu",), backend="aot_eager")
    for name in ("auto", "compiled"):
        monkeypatch.setitem(EXECUTORS, name, KernelExecutor(kernel, on_device=True))
