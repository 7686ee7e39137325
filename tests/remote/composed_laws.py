"""Laws of composed optimizers, for every transport."""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim import (
    DistributedOptimizer,
    Optimizer,
    accumulate,
    adamw,
    chain,
    clip_by_global_norm,
    matching,
    muon,
    partition,
    prodigy,
)
from tests.choices import case
from tests.composition.trees import COMPOSED, HOLES, STEPS, grads_at, kind, params_of, run_of
from tests.tensors import assert_same

from .law_support import Make, values

MORE: dict[str, Callable[[], Optimizer]] = {
    **COMPOSED,
    "muon and adamw": lambda: partition({"matrices": muon(0.1), "rest": adamw(0.01)}, kind),
    "overrides": lambda: adamw(0.01).override(matching("*bias"), weight_decay=0.0, lr=0.1),
    "prodigy": prodigy,
}


def named() -> dict[str, Tensor]:
    return {name: one.requires_grad_() for name, one in params_of().items()}


def placement(workers: int, shift: int = 0) -> dict[str, str]:
    return {name: f"ps{(place + shift) % workers}" for place, name in enumerate(params_of())}


def composed_optimizers_equal_the_local_run(make: Make) -> None:
    """In the middle of a batch, the state moves to threads, and from there to other workers."""
    for name, chosen in MORE.items():
        with case(name=name):
            optimizer = make(chosen(), named(), placement(2))
            saved, params = stepped(optimizer, range(2))
            optimizer = DistributedOptimizer.over_threads(chosen(), params, placement(3))
            optimizer.load_state_dict(saved)
            saved, params = stepped(optimizer, range(2, 5))
            optimizer = make(chosen(), params, placement(2, 1))
            optimizer.load_state_dict(saved)
            _, params = stepped(optimizer, range(5, STEPS))
            want = run_of(chosen(), missing=HOLES)[0]
            assert_same({name: one.detach() for name, one in params.items()}, want)


def stepped(
    optimizer: DistributedOptimizer, numbers: range
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Make these steps, close the optimizer, and return its state and its parameters."""
    for step in numbers:
        optimizer.step(grads_at(step, missing=HOLES))
    saved, params = optimizer.state_dict(), values(optimizer)
    optimizer.close()
    return saved, {name: one.requires_grad_() for name, one in params.items()}


BATCHES_OF_TWO = chain(accumulate(2), clip_by_global_norm(0.5), adamw(lr=0.1))
"""Chain in which the order of steps decides which gradients are clipped together."""


def steps_at_once_have_one_order_on_all_workers(make: Make) -> None:
    """The order also covers accumulated gradients, step counts, and totals."""
    optimizer = make(BATCHES_OF_TWO, named(), placement(2))
    calls = [threading.Thread(target=optimizer.step, args=(grads_at(k),)) for k in range(4)]
    for one in calls:
        one.start()
    for one in calls:
        one.join(60)
    found = values(optimizer)
    optimizer.close()
    is_one_of_the_serial_orders(found, range(4))


def is_one_of_the_serial_orders(found: dict[str, Tensor], steps: Sequence[int]) -> None:
    """Assert that some serial order of these steps of ``BATCHES_OF_TWO`` gives ``found``."""
    for order in itertools.permutations(steps):
        params: Any = params_of()
        state = BATCHES_OF_TWO.init(params)
        for step in order:
            params, state = BATCHES_OF_TWO.update(params, grads_at(step), state)
        if all(torch.equal(found[name], params[name]) for name in params):
            return
    raise AssertionError(f"{found} is what no order of these steps gives")


LAWS = {
    one.__name__: one
    for one in (
        composed_optimizers_equal_the_local_run,
        steps_at_once_have_one_order_on_all_workers,
    )
}
