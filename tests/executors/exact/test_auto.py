"""What auto picks."""

from typing import Any

import pytest
import torch

from functional_optim import Optimizer, adamw, chain, clip_by_value, lion, qhm, sgd, stored
from functional_optim.kernels import auto
from functional_optim.kernels.auto import AutoKernel
from functional_optim.kernels.blocked import BlockedKernel
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.exact import ExactKernel

from ...choices import case, pairs
from ..rules import RULES
from ..support import lane_of

WORTH = 64
OPTIMIZERS = [sgd(), sgd(momentum=0.9), adamw(), lion(), chain(clip_by_value(1.0), qhm())]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> AutoKernel:
    """In a process that has compiled nothing."""
    monkeypatch.setattr(auto, "WORTH_COMPILING", WORTH)
    monkeypatch.setattr("functional_optim.kernels.exact.kernel._PROGRAMS", Cache())
    return AutoKernel()


def choice(kernel: AutoKernel, optimizer: Optimizer, numel: int) -> Any:
    return kernel.choose(optimizer.stages, lane_of(optimizer, torch.zeros(numel)))


def test_a_loop_is_compiled_where_it_is_worth_it_and_used_wherever_it_is_there(
    kernel: AutoKernel,
) -> None:
    for optimizer in OPTIMIZERS:
        with case(optimizer=optimizer):
            assert choice(kernel, optimizer, WORTH - 1).name == "blocked"
            assert choice(kernel, optimizer, 1).name == "blocked"
            assert choice(kernel, optimizer, WORTH).name == "exact"
            for numel in (1, WORTH - 1, 100 * WORTH):
                assert choice(kernel, optimizer, numel).name == "exact"


class Tried:
    """A kernel, and how many steps of what was bound to one lane or to many it made."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.steps = kernel, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def bind(self, *given: Any) -> Any:
        run = self.kernel.bind(*given)

        def counted(totals: Any) -> None:
            self.steps += 1
            run(totals)

        return run if isinstance(run, str) else counted


def stepped(kernel: AutoKernel, stages: Any, lane: Any) -> None:
    run = kernel.bind(stages, lane)
    assert not isinstance(run, str)
    run([])


@pytest.mark.usefixtures("kernel")
def test_what_steps_is_what_is_chosen() -> None:
    """Alone, and bound to many; for chains that blocks alone take, too."""
    exact, blocked = Tried(ExactKernel()), Tried(BlockedKernel())
    kernel = AutoKernel(exact=exact, blocked=blocked)  # type: ignore[arg-type]  # as such kernels
    seen = set()
    optimizers = [*OPTIMIZERS, RULES["library"], stored(lion(0.1), state="int8")]
    for one in pairs(numel=[1, WORTH - 1, WORTH, 300], optimizer=optimizers, there=[False, True]):
        with case(**one), pytest.MonkeyPatch.context() as patch:
            patch.setattr("functional_optim.kernels.exact.kernel._PROGRAMS", Cache())
            stages = one["optimizer"].stages
            lane = lane_of(one["optimizer"], torch.zeros(one["numel"]))
            if one["there"]:
                stepped(kernel, stages, lane_of(one["optimizer"], torch.zeros(WORTH)))
            chosen = kernel.choose(stages, lane)
            exact.steps = blocked.steps = 0
            feed = kernel.bind_table(stages, lane, one["numel"])
            assert (feed is not None) == (chosen.kernel is exact)
            stepped(kernel, stages, lane)
            made = {"exact": exact.steps, "blocked": blocked.steps}
            assert made == {"exact": 0, "blocked": 0} | {chosen.name: 1}
            seen.add((chosen.name, one["there"]))
    assert seen == {("exact", True), ("exact", False), ("blocked", True), ("blocked", False)}


def test_what_has_no_formula_is_blocked_and_why_is_said(kernel: AutoKernel) -> None:
    found = choice(kernel, RULES["library"], WORTH)
    assert found.name == "blocked" and "has no formula that is torch's to the bit" in found.reason
