"""Choices of the executor ``auto``."""

from typing import Any

import pytest
import torch

from functional_optim import Optimizer, adamw, chain, clip_by_value, lion, qhm, sgd, stored
from functional_optim.kernels import KernelExecutor
from functional_optim.kernels.blocked_kernel import BlockedKernel
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.exact import ExactKernel
from functional_optim.kernels.table import EXECUTORS

from ...choices import case, pairs
from ..rules import RULES
from ..support import chunk_of

WORTH = 64
OPTIMIZERS = [sgd(), sgd(momentum=0.9), adamw(), lion(), chain(clip_by_value(1.0), qhm())]


@pytest.fixture
def nothing_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget all compiled programs, and set the least size that is worth compiling."""
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", WORTH)
    monkeypatch.setattr("functional_optim.kernels.exact.kernel._PROGRAMS", Cache())


def explained(optimizer: Optimizer, numel: int) -> str:
    auto = EXECUTORS["auto"].in_chunks(optimizer.stages)
    assert auto is not None
    return auto.explain(optimizer.stages, chunk_of(optimizer, torch.zeros(numel)))


@pytest.mark.usefixtures("nothing_is_there")
def test_a_loop_is_compiled_where_it_is_worth_it_and_used_wherever_it_is_there() -> None:
    for optimizer in OPTIMIZERS:
        with case(optimizer=optimizer):
            for numel in (WORTH - 1, 1):
                said = explained(optimizer, numel)
                assert said == "blocked; no loop is compiled for so few elements"
            for numel in (WORTH, 1, WORTH - 1, 100 * WORTH):
                assert explained(optimizer, numel).startswith("exact; ")


class Tried:
    """Wrapper of a kernel that counts the steps of its bound calls."""

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


@pytest.mark.usefixtures("nothing_is_there")
def test_what_steps_is_what_is_said() -> None:
    """The explanation names the kernel that steps, for exact and for blocked chains."""
    exact: Any = Tried(ExactKernel(sparing=True))
    blocked: Any = Tried(BlockedKernel())
    auto = KernelExecutor(exact, blocked, joining=exact)
    seen = set()
    optimizers = [*OPTIMIZERS, RULES["library"], stored(lion(0.1), state="int8")]
    for one in pairs(numel=[1, WORTH - 1, WORTH, 300], optimizer=optimizers, there=[False, True]):
        with case(**one), pytest.MonkeyPatch.context() as patch:
            patch.setattr("functional_optim.kernels.exact.kernel._PROGRAMS", Cache())
            stages = one["optimizer"].stages
            chunk = chunk_of(one["optimizer"], torch.zeros(one["numel"]))
            if one["there"]:
                auto.bind_chunk(stages, chunk_of(one["optimizer"], torch.zeros(WORTH)), [])()
            chosen, *_ = auto.explain(stages, chunk).split(";")
            exact.steps = blocked.steps = 0
            bind_scalars = auto.bind_table(stages, chunk, one["numel"])
            assert (bind_scalars is not None) == (chosen == "exact")
            auto.bind_chunk(stages, chunk, [])()
            made = {"exact": exact.steps, "blocked": blocked.steps}
            assert made == {"exact": 0, "blocked": 0} | {chosen: 1}
            seen.add((chosen, one["there"]))
    assert seen == {("exact", True), ("exact", False), ("blocked", True), ("blocked", False)}


@pytest.mark.usefixtures("nothing_is_there")
def test_what_has_no_formula_is_blocked_and_why_is_said() -> None:
    said = explained(RULES["library"], WORTH)
    assert said.startswith("blocked; ") and "has no formula that is torch's to the bit" in said
