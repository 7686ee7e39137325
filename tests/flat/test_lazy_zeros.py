"""Zeros that take no memory before the first write, and otherwise behave like any zeros."""

import sys

import pytest
import torch

from functional_optim.core.buffer_memory import LEAST_BYTES, lazy_zeros

from ..choices import case, pairs


def test_they_are_zeros_like_any() -> None:
    for chosen in pairs(
        dtype=[torch.float32, torch.bfloat16, torch.float64, torch.complex64],
        size=[0, 5, LEAST_BYTES],
    ):
        with case(**chosen):
            like = torch.ones(chosen["size"], dtype=chosen["dtype"])
            made = lazy_zeros(like)
            assert made.dtype == like.dtype and made.shape == like.shape
            assert not made.any()
            assert made.data_ptr() % 16 == 0
            made += 1
            assert torch.equal(made, like)


def test_elsewhere_they_are_torchs() -> None:
    like = torch.empty(LEAST_BYTES, device="meta")
    assert lazy_zeros(like).device == like.device


def test_where_there_are_no_such_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["mmap"], "MAP_ANONYMOUS")
    assert torch.equal(lazy_zeros(torch.ones(LEAST_BYTES)), torch.zeros(LEAST_BYTES))
