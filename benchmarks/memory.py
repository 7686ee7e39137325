"""Peak memory of one step above parameters, gradients and state, measured by the kernel."""

import ctypes
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.cases import CASES, OptimizerCase
from benchmarks.records import Memory
from benchmarks.workloads import WORKLOADS, Shape, Size

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")

RULES = ("AdamW", "clip + decay + QHM")
UPDATE = ("blocked", "auto")
BOUND = "auto, bound"
PEERS: dict[str, dict[str, bool]] = {
    "torch for-loop": {"foreach": False},
    "torch foreach": {"foreach": True},
    "torch fused": {"fused": True},
}


def missing() -> str:
    """Return why the peak cannot be measured here; empty if it can."""
    try:
        CLEAR.write_text("5", encoding="ascii")
    except OSError as error:
        return f"the kernel does not let a process reset its peak: {error}"
    return ""


def peak_above(step: Callable[[], object]) -> int:
    """Return the bytes of resident memory that a step adds, after two warm-up steps."""
    for _ in range(2):
        step()
    gc.collect()
    # Freed memory goes back to the system first, so that a step cannot reuse it unseen.
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)
    before = _status("VmRSS")
    CLEAR.write_text("5", encoding="ascii")  # resets the peak to the resident memory
    step()
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    for line in STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no {field}")


def run_memory(
    *,
    workload: str,
    size: Size,
    rules: Sequence[str],
    ways: Sequence[str],
    tell: Callable[..., Any],
) -> list[Memory]:
    """Measure every way to step one workload. The process must have done nothing else."""
    shapes = WORKLOADS[workload].shapes[size]()
    grads = [torch.full(shape, 0.01) for shape in shapes]
    total = sum(grad.numel() * grad.element_size() for grad in grads)
    found = []
    for rule in rules:
        for way in (*UPDATE, BOUND, *PEERS):
            if (ways and way not in ways) or (way == "torch fused" and not CASES[rule].fused):
                continue
            tell(f"{rule}: {way}")
            found.append(_measured(workload, rule, way, total, shapes, grads))
    return found


def _measured(
    workload: str, rule: str, way: str, total: int, shapes: Sequence[Shape], grads: Sequence[Tensor]
) -> Memory:
    try:
        extra = peak_above(_step(CASES[rule], way, shapes, grads))
    except Exception as error:  # noqa: BLE001  one way's fault must not end the others' run
        return Memory(workload, rule, way, total, 0, f"{type(error).__name__}: {error}"[:500])
    return Memory(workload, rule, way, total, extra)


def _step(
    case: OptimizerCase, way: str, shapes: Sequence[Shape], grads: Sequence[Tensor]
) -> Callable[[], object]:
    params: list[Any] = [torch.full(shape, 0.5) for shape in shapes]
    if way in PEERS:
        params = [Parameter(param) for param in params]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        step: Callable[[], object] = case.torch_class(params, **PEERS[way]).step
        return step
    if way == BOUND:
        bound = case.ours().using(executor="auto").bind(params)
        bound.ready()
        return lambda: bound.step(list(grads))
    executor: Any = way
    optimizer = case.ours().using(executor=executor)
    state = optimizer.init(params)
    return lambda: optimizer.update_(params, list(grads), state)
