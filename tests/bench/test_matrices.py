"""The race of Muons: it runs, and all contestants make the same steps."""

import torch
from click.testing import CliRunner

from benchmarks.matrices import FRONT, THEIRS, TINY, WAYS, contestants, main

from ..choices import case


def test_every_contestant_makes_its_steps() -> None:
    for name, shapes in TINY.items():
        made = contestants(shapes, torch.float32)
        with case(name=name):
            assert list(made) == [THEIRS, FRONT, *WAYS]
            for step in made.values():
                step()


def test_it_prints_a_ratio_for_each_way() -> None:
    said = CliRunner().invoke(main, ["--tiny", "--rounds", "1", "--seconds", "0"])
    assert said.exit_code == 0
    lines = said.output.strip().splitlines()
    assert len(lines) == 2 + 2 * len(TINY)
    assert all(line.count("|") == 3 + len([FRONT, *WAYS]) for line in lines)
