"""Pieces of a leaf have torch's bits for the whole leaf, for any number of threads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_optim import NoState, Optimizer, adamw, qhm, rmsprop, sgd
from functional_optim.kernels import pieces
from functional_optim.kernels.pieces import GRAIN_SIZE, piece_lengths

from ...choices import case, examples, pairs
from ..rules import Hyper, stateless
from ..support import noise, torch_threads


def branching(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    if c.lr > 0.05:  # prevents tracing
        return torch.add(param, grad, alpha=-c.lr), state
    return param, state


def sigmoidal(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return param - torch.sigmoid(grad) * torch.atan2(grad, param), state


CHAINS: dict[str, Optimizer] = {
    "momentum": sgd(0.1, momentum=0.9),
    "qhm": qhm(0.1),
    "rmsprop": rmsprop(0.1, centered=True, momentum=0.9),
    "adamw": adamw(0.1),
    "not traced": stateless(branching, "branching"),
    "computed by position": stateless(sigmoidal, "sigmoidal"),
}
COUNTS = (65_836, 2 * 65_536 + 300)
"""Numbers of elements: two blocks, and more blocks with a share that ends within a block."""


def test_large_leaves_round_as_the_reference_does(
    near_borders: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUNCTIONAL_OPTIM_BLOCK", str(1 << 16))
    monkeypatch.setattr(pieces, "PIECE", 1 << 16)
    dtypes = torch.bfloat16, torch.float32
    for one in pairs(name=CHAINS, threads=[1, 2, 3], count=COUNTS, dtype=dtypes):
        given = [noise(seed, one["count"], dtype=one["dtype"]) for seed in range(3)]
        found = []
        for executor in ("reference", "blocked"):
            optimizer, params = CHAINS[one["name"]].using(executor=executor), given[0].clone()
            state = optimizer.init(params)
            with torch_threads(one["threads"]):
                for grad in given[1:]:
                    optimizer.update_(params, grad, state)
            found.append(params.view(torch.int16))
        with case(**one):
            assert torch.equal(*found)


@examples(80)
@given(total=st.integers(0, 5_000_000), block=st.integers(1, 3_000_000), threads=st.integers(1, 3))
def test_pieces_are_grains_for_each_thread_and_end_where_shares_end(
    total: int, block: int, threads: int
) -> None:
    block = max(block, total // 500)  # limits the number of pieces
    with torch_threads(threads):
        plain, found = (piece_lengths(total, block, exact=exact) for exact in (False, True))
    assert sum(plain) == total and max(plain, default=0) <= block
    assert sum(found) == total
    if total <= block:
        return
    share = -(-total // min(threads, -(-total // GRAIN_SIZE)))
    ends = {sum(found[: k + 1]) for k in range(len(found))}
    assert {*range(share, total, share)} <= ends
    start = 0
    for one in found:
        within = start % share
        assert within % GRAIN_SIZE == 0
        assert one < GRAIN_SIZE or one % (GRAIN_SIZE * threads) == 0 or one // GRAIN_SIZE < threads
        start += one
