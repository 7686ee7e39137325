"""Separate gradients that exact loops read where they are."""

import pytest
import torch

from functional_optim import adamw, lion, sgd, stored
from functional_optim.kernels.exact import kernel

from ..choices import case, pairs
from .plain.test_separate_gradients import in_buckets, params
from .support import Twins, noise


@pytest.mark.usefixtures("both_ways")
def test_buckets_that_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps have the same bits if missing gradients make step counts differ."""
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 1)
    dtypes = (torch.float32, torch.float64, torch.complex64)
    for one in pairs(executor=["compiled", "auto"], dtype=dtypes):
        twins = Twins(
            sgd(0.1, momentum=0.9), lambda dtype=one["dtype"]: params(dtype), one["executor"]
        )
        for step in range(6):
            without = {1: "c", 2: "ag", 4: "abcdefg"}.get(step, "")
            with case(**one, step=step):
                twins.step(in_buckets(twins.plain, 10 * step, without))


@pytest.mark.usefixtures("both_ways")
def test_stored_chains() -> None:
    """Blocks of stored chains restart at each parameter."""
    for state in ("int8", "bfloat16"):
        optimizer = stored(lion(0.1), state=state)
        twins = Twins(optimizer, lambda: [noise(0, 300), noise(1, 7), noise(2, 512)], "auto")
        for step in range(3):
            with case(state=state, step=step):
                twins.step([noise(10 * step + k, n) for k, n in enumerate((300, 7, 512))])


def test_few_elements_are_stepped_by_a_loop_that_others_have_pushed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 1 << 12)
    twins = Twins(adamw(lr=0.1), lambda: {"a": noise(0, 5000), "b": noise(1, 10)}, "auto")
    for a in (noise(2, 5000), None, None):
        twins.step({"a": a, "b": noise(3, 10)})
        kernel._PROGRAMS.clear()
