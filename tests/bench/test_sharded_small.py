"""Race of many small parameters: the command runs, and all contestants make the same steps."""

import pytest
import torch
from torch import Tensor

from benchmarks.sharded_small import ELEMENTS, FRONT, FUSED, OURS, THEIRS, contestants, lines

from ..choices import case


@pytest.mark.usefixtures("world_of_one")
def test_every_contestant_makes_the_same_steps() -> None:
    made = contestants(6, 3)
    assert list(made) == [OURS, ELEMENTS, FRONT, FUSED, THEIRS]

    def params(name: str) -> list[Tensor]:
        groups = made[name].__self__.param_groups  # type: ignore[attr-defined]
        return [one.detach() for group in groups for one in group["params"]]

    for step in made.values():
        step()
        step()
    wanted = params(FRONT)
    for name in made:
        with case(name=name):
            for one, other in zip(params(name), wanted, strict=True):
                torch.testing.assert_close(one, other)


def test_a_row_for_each_policy() -> None:
    seconds = {name: [1.0, 2.0] for name in (OURS, ELEMENTS, FRONT, FUSED, THEIRS)}
    seconds[FRONT] = [0.5, 0.5]
    first, second = lines(2, seconds)
    assert first == f"| 2 | {OURS} | 1,500 (1,000 to 2,000) | 3.00 (2.00 to 4.00) |" + (
        " 1.00 (1.00 to 1.00) |" * 2
    )
    assert second.startswith(f"| 2 | {ELEMENTS} |")
