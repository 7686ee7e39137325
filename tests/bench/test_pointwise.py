"""Race of pointwise algorithms with the floor: the exact kernel makes the steps."""

import torch
from click.testing import CliRunner

from benchmarks.pointwise import ALGORITHMS, TINY, main
from functional_optim import TorchOptimizer

from ..choices import case


def test_it_prints_a_ratio_for_each_algorithm() -> None:
    said = CliRunner().invoke(main, ["--tiny", "--rounds", "1", "--seconds", "0"])
    assert said.exit_code == 0
    lines = said.output.strip().splitlines()
    assert len(lines) == 2 + len(ALGORITHMS)
    assert all(line.count("|") == 3 + len(TINY) for line in lines)


def test_bytes_are_those_of_values_that_change_and_of_gradients() -> None:
    for name, one in ALGORITHMS.items():
        param = torch.nn.Parameter(torch.ones(4))
        param.grad = torch.ones(4)
        optimizer = TorchOptimizer([param], one.make())
        states = [value for key, value in optimizer.state[param].items() if key != "step"]
        with case(name=name):
            assert one.bytes == 4 * (3 + 2 * len(states))
            assert "exact" in one.make().using(executor="auto").explain([torch.ones(1 << 13)])
