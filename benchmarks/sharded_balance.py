"""Balance of plans that spread a model over ranks. It is calculated without a process group."""

from collections.abc import Callable

from benchmarks.records import Balance
from benchmarks.workloads import GPT2, RESNET50, WORKLOADS, Shape
from functional_optim import adamw
from sharding import ParameterSpec, plan

GREEDY, LARGEST_FIRST, ELEMENTS = "greedy", "largest_first", "elements"
POLICIES = (GREEDY, LARGEST_FIRST, ELEMENTS)
"""Policies. The first one makes the partition of torch's class."""
RANKS = (2, 8, 64, 512, 4096)

EMBEDDING = "embedding + 100 small"


def _embedding() -> list[Shape]:
    return [(250_000, 1024), *[(256, 256)] * 100]


MODELS: dict[str, Callable[[], list[Shape]]] = {
    GPT2: WORKLOADS[GPT2].shapes["full"],
    RESNET50: WORKLOADS[RESNET50].shapes["full"],
    EMBEDDING: _embedding,
}
"""Models, in full size for all sizes of a run, because the calculation takes only a second."""


def run_balance(*, model: str) -> list[Balance]:
    """Return the bytes of parameters, gradients and AdamW's state for each policy."""
    specs = [ParameterSpec(str(number), shape) for number, shape in enumerate(MODELS[model]())]
    rule = adamw()
    found = []
    for ranks in RANKS:
        largest, total = {}, {}
        for policy in POLICIES:
            # Torch's policy counts only elements. Ours get the rule, and count its state too.
            stepper = None if policy == GREEDY else rule
            column = plan(specs, ranks, policy, stepper).report(rule).total_bytes
            largest[policy], total[policy] = max(column), sum(column)
        found.append(Balance(model, ranks, largest, total))
    return found
