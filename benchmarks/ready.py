"""Time to the end of the first compiled step, in a separate process."""

import time
from typing import Any

import torch
from torch.nn import Parameter

import functional_optim.testing.compiled_executor  # noqa: F401  adds the executor "compiled"
from benchmarks.cases import CASES
from benchmarks.workloads import WORKLOADS, Size

WAYS = ("compiled", "torch compiled")
RULE = "AdamW"
WORKLOAD = "10 x 100"


def run_ready(*, way: str, size: Size) -> float:
    """Return the seconds from plain parameters to the end of the first compiled step.

    The time includes imports of the compiler. It does not include imports of torch and of this
    package.
    """
    case = CASES[RULE]
    params = [Parameter(torch.full(shape, 0.5)) for shape in WORKLOADS[WORKLOAD].shapes[size]()]
    grads = [torch.ones_like(param) for param in params]
    begin = time.perf_counter()
    if way == "torch compiled":
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        step: Any = torch.compile(case.torch_class(params).step)
        step()
    else:
        executor: Any = way
        bound = case.ours().using(executor=executor).bind(params)
        bound.step(grads)
    return time.perf_counter() - begin
