"""Race of Muon implementations: the command runs, and all contestants make the same steps."""

from itertools import chain, product

import torch
from click.testing import CliRunner

from benchmarks.matrices import FRONT, THEIRS, TINY, WAYS, contestants, main

from ..choices import case


def test_every_contestant_makes_the_same_steps() -> None:
    """Every contestant steps to the same bits as torch's Muon."""
    for name, shapes in TINY.items():
        for dtype in (torch.float32, torch.bfloat16):
            made = contestants(shapes, dtype)
            for param in chain.from_iterable(one.params for one in made.values()):
                param.detach().mul_(2**-8)  # so that bfloat16 does not round the steps away
            start = [one.detach().clone() for one in made[THEIRS].params]
            assert list(made) == [THEIRS, FRONT, *WAYS]
            for _, one in product(range(3), made.values()):
                one.step()
            for way, one in made.items():
                with case(name=name, dtype=dtype, way=way):
                    ours, theirs = (
                        [one.detach() for one in each.params] for each in (one, made[THEIRS])
                    )
                    for got, want, old in zip(ours, theirs, start, strict=True):
                        assert not torch.equal(want, old)
                        assert torch.equal(got, want)


def test_it_prints_a_ratio_for_each_way() -> None:
    said = CliRunner().invoke(main, ["--tiny", "--rounds", "1", "--seconds", "0"])
    assert said.exit_code == 0
    lines = said.output.strip().splitlines()
    assert len(lines) == 2 + 2 * len(TINY)
    assert all(line.count("|") == 3 + len([FRONT, *WAYS]) for line in lines)
