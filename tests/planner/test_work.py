"""The work that planning takes, counted in bytecodes: it grows with the parameters, no faster."""

import sys
from collections.abc import Callable
from random import Random
from types import FrameType
from typing import Any

import pytest

from functional_optim import adamw
from sharding import POLICIES, ParameterSpec, plan, reshard

RANKS = 64


def opcodes(run: Callable[[], Any]) -> int:
    """How many bytecodes a call executes."""
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


def parameters(number: int) -> list[ParameterSpec]:
    random = Random(0)
    return [
        ParameterSpec(f"p{place}", (int(random.lognormvariate(8, 2)),)) for place in range(number)
    ]


@pytest.mark.parametrize("optimizer", [None, adamw()], ids=["elements", "bytes"])
@pytest.mark.parametrize("name", POLICIES)
def test_twice_the_parameters_take_twice_the_work(name: str, optimizer: Any) -> None:
    options = {"node_size": 8} if name == "hierarchical" else {}
    few, many = parameters(2000), parameters(4000)
    small = opcodes(lambda: plan(few, RANKS, name, optimizer, **options))
    large = opcodes(lambda: plan(many, RANKS, name, optimizer, **options))
    assert large < 2.5 * small
    assert large < 1000 * len(many)


def test_resharding_takes_work_in_proportion_to_the_pieces() -> None:
    def work(number: int) -> int:
        before, after = (
            plan(parameters(number), ranks, "elements") for ranks in (RANKS, RANKS + 1)
        )
        reshard(before, after)  # fills what plans keep
        return opcodes(lambda: reshard(before, after))

    assert work(2000) < 2.5 * work(1000)
