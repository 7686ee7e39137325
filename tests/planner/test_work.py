"""Work of the planner in bytecodes: it grows no faster than the number of parameters."""

import sys
from collections.abc import Callable
from functools import partial
from random import Random
from types import FrameType
from typing import Any

from functional_optim import adamw
from sharding import POLICIES, plan, reshard
from tests.choices import case, pairs

from .support import of_sizes

RANKS = 64


def opcodes(run: Callable[[], Any]) -> int:
    """Count the bytecodes that a call executes."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def parameters(number: int) -> list[Any]:
    random = Random(0)
    return of_sizes(*(int(random.lognormvariate(8, 2)) for _ in range(number)))


def test_twice_the_parameters_take_twice_the_work() -> None:
    few, many = parameters(400), parameters(800)
    for chosen in pairs(policy=list(POLICIES), optimizer=[None, adamw()]):
        name, optimizer = chosen["policy"], chosen["optimizer"]
        options = {"node_size": 8} if name == "hierarchical" else {}
        with case(**chosen):
            small, large = (
                opcodes(partial(plan, specs, RANKS, name, optimizer, **options))
                for specs in (few, many)
            )
            assert large < 2.5 * small
            assert large < 1500 * len(many)


def test_resharding_takes_work_in_proportion_to_the_pieces() -> None:
    def work(number: int) -> int:
        before, after = (plan(parameters(number), ranks, "elements") for ranks in (16, 17))
        reshard(before, after)  # fills the caches of the plans
        return opcodes(lambda: reshard(before, after))

    assert work(800) < 2.5 * work(400)
