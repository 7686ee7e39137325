"""16-bit floats: however torch shares a leaf among its threads, pieces of it round as it does."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_optim import NoState, Optimizer, Rule, adamw, chain, qhm, rmsprop, sgd
from functional_optim.executors.shares import GRAIN, lengths

from .support import noise


class Hyper(NamedTuple):
    lr: float


def branching(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    if c.lr > 0.05:  # so that it is not traced
        return torch.add(param, grad, alpha=-c.lr), state
    return param, state


CHAINS: dict[str, Optimizer] = {
    "momentum": sgd(0.1, momentum=0.9),
    "qhm": qhm(0.1),
    "rmsprop": rmsprop(0.1, centered=True, momentum=0.9),
    "adamw": adamw(0.1),
    "not traced": chain(Rule(name="branching", hyper=Hyper, rule=branching)(lr=0.1)),
}


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """As many threads of torch's; as before, afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("executor", ["script", "blocked"])
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("count", [65_836, 300_001, 1_118_577])
def test_large_leaves_round_as_the_reference_does(
    name: str, executor: Any, count: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUNCTIONAL_OPTIM_BLOCK", str(1 << 16))
    found = []
    for one in ("reference", executor):
        optimizer = CHAINS[name].using(executor=one)
        params = {"w": noise(0, count).bfloat16()}
        state = optimizer.init(params)
        for seed in (1, 2):
            optimizer.update_(params, {"w": noise(seed, count).bfloat16()}, state)
        found.append(params["w"].view(torch.int16))
    assert torch.equal(*found)


@given(total=st.integers(0, 5_000_000), block=st.integers(1, 3_000_000))
def test_pieces_are_grains_for_each_thread_and_end_where_shares_end(total: int, block: int) -> None:
    assert sum(lengths(total, block, exact=False)) == total
    assert max(lengths(total, block, exact=False), default=0) <= block
    found = lengths(total, block, exact=True)
    assert sum(found) == total
    if total <= block:
        return
    threads = torch.get_num_threads()
    share = -(-total // min(threads, -(-total // GRAIN)))
    ends = {sum(found[: k + 1]) for k in range(len(found))}
    assert {*range(share, total, share)} <= ends
    start = 0
    for one in found:
        within = start % share
        assert within % GRAIN == 0
        assert one < GRAIN or one % (GRAIN * threads) == 0 or one // GRAIN < threads
        start += one
