"""Choices of the executor ``auto``."""

import pytest
import torch

from functional_optim import Optimizer, adamw, chain, clip_by_value, lion, qhm, sgd
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.table import EXECUTORS

from ...choices import case
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


@pytest.mark.usefixtures("nothing_is_there")
def test_what_has_no_formula_is_blocked_and_why_is_said() -> None:
    said = explained(RULES["library"], WORTH)
    assert said.startswith("blocked; ") and "has no formula that is torch's to the bit" in said
