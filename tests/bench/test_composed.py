"""Race of composed optimizers: the command runs, and each peer makes the same steps."""

import torch
from click.testing import CliRunner

from benchmarks.composed import PAIRS, TINY, contestants, main

from ..choices import case


def test_a_peer_makes_the_same_steps() -> None:
    for name, pair in PAIRS.items():
        for shapes in TINY.values():
            steps, (ours, theirs) = contestants(pair, shapes)
            start = [one.detach().clone() for one in ours]
            for _ in range(8):
                for step in steps.values():
                    step()
                if name == "schedule-free AdamW":  # the package writes to gradients
                    for mine, other in zip(ours, theirs, strict=True):
                        other.grad = None if mine.grad is None else mine.grad.clone()
            for got, want, old in zip(ours, theirs, start, strict=True):
                with case(name=name):
                    assert not torch.equal(want, old)
                    torch.testing.assert_close(got, want)


def test_it_prints_a_ratio_for_each_pair() -> None:
    said = CliRunner().invoke(main, ["--tiny", "--rounds", "1", "--seconds", "0"])
    assert said.exit_code == 0
    lines = said.output.strip().splitlines()
    assert len(lines) == 2 + len(PAIRS)
    assert all(line.count("|") == 3 + len(TINY) for line in lines)
