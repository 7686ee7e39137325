"""Loops of random rules have the bits of torch's operations."""

from typing import Any

import torch
from hypothesis import Phase, given, note
from hypothesis import strategies as st

from ...choices import examples
from .random_rules import RandomRule, numbers, random_rules
from .support import STYLES, assert_equal, drawn, explained

LENGTHS = (1, 7, 129, 1_025, 4_100)


def test_random_rules() -> None:
    """More than 90 percent of random rules have a loop, which gives torch's bits."""
    compiled: list[bool] = []

    @examples(12, report_multiple_bugs=False, phases=(Phase.generate, Phase.shrink))
    @given(random_rules(), st.sampled_from([torch.float32, torch.float64]), numbers())
    def is_reference(rule: RandomRule, dtype: torch.dtype, given: dict[str, float]) -> None:
        said = explained(rule.optimizer(), torch.ones(300, dtype=dtype))
        note(said)
        compiled.append(said.startswith("exact"))
        if compiled[-1]:
            check(rule, dtype, {})
            check(rule, dtype, given)

    is_reference()
    assert sum(compiled) > 0.9 * len(compiled)


def check(rule: RandomRule, dtype: torch.dtype, given: dict[str, Any]) -> None:
    """Check one step from numbers of every kind."""
    optimizer = rule.optimizer(**given)
    reference, other = (optimizer.using(executor=one) for one in ("reference", "compiled"))
    for seed, style in enumerate(STYLES):
        for count in LENGTHS:
            p, g, *states = (
                drawn(10 * seed + k, count, dtype, style=style) for k in range(2 + rule.states)
            )
            state = optimizer.init(p)
            for old, new in zip(state.leaves.stages[0].kept, states, strict=True):
                old.copy_(new)
            assert_equal(other.update(p, g, state), reference.update(p, g, state))
