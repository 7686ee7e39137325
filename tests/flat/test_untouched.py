"""Gradient buffers take memory once they are used."""

import resource
import sys
from pathlib import Path

import pytest
import torch

from functional_optim import sgd
from functional_optim.untouched import LEAST_BYTES, untouched_zeros

COUNT = 1 << 24

PAGES = Path("/proc/self/statm")
linux = pytest.mark.skipif(not PAGES.exists(), reason="only Linux says how much memory is resident")


def resident() -> int:
    return int(PAGES.read_text().split()[1]) * resource.getpagesize()


@linux
def test_who_gives_gradients_of_their_own_has_none_of_ours_in_memory() -> None:
    param = torch.ones(COUNT)
    param.grad = torch.ones(COUNT)
    bound = sgd(0.5).using(executor="auto").bind([param])
    bound.step()  # what is needed once
    before = resident()
    other = torch.ones(COUNT)
    other.grad = torch.ones(COUNT)
    again = sgd(0.5).using(executor="auto").bind([other])
    again.step()
    held = resident() - before
    # The parameter, copied into its buffer, and its gradient.
    assert held < 2.5 * COUNT * 4
    again.gradients[0].fill_(2.0)
    assert resident() - before > held + COUNT * 4 // 2
    again.step(again.gradients)
    assert torch.equal(other, torch.full((COUNT,), -0.5))
    assert torch.equal(param, torch.full((COUNT,), 0.5)) and bound is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("size", [0, 5, LEAST_BYTES])
def test_they_are_zeros_like_any(dtype: torch.dtype, size: int) -> None:
    like = torch.ones(size, dtype=dtype)
    made = untouched_zeros(like)
    assert made.dtype == dtype and made.shape == like.shape
    assert not made.any()
    assert made.data_ptr() % 16 == 0
    made += 1
    assert torch.equal(made, like)


def test_elsewhere_they_are_torchs() -> None:
    like = torch.empty(LEAST_BYTES, device="meta")
    assert untouched_zeros(like).device == like.device


def test_where_there_are_no_such_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["mmap"], "MAP_ANONYMOUS")
    assert torch.equal(untouched_zeros(torch.ones(LEAST_BYTES)), torch.zeros(LEAST_BYTES))
