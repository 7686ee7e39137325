"""The exact kernel over leaves of every length and dtype, with any number of threads."""

import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import adamw, chain, clip_by_global_norm, sgd
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.chunks import Table
from functional_optim.kernels.exact import kernel
from functional_optim.kernels.exact.program import LoopProgram
from tests.cases import ONE_CHAIN

from ...choices import EVERYTHING, case, one_in, pairs
from ..rules import RULES
from ..support import noise, together, torch_threads
from .support import assert_equal, assert_steps_are_equal, explained

TABLE = {name: one.factory() for name, one in ONE_CHAIN.items()}
LENGTHS = (1, 2, 31, 127, 128, 129, 4_096, 33_001)
"""Lengths around a vector, a block of the loop, and a page. The last needs several threads."""
SHORT = (torch.bfloat16, torch.float16)


def leaves(lengths: Any, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [noise(seed + k, length, dtype=dtype) for k, length in enumerate(lengths)]


def require_equal(optimizer: Any, lengths: Any, dtype: torch.dtype, **more: Any) -> None:
    def grads(step: int) -> list[Tensor]:
        return leaves(lengths, 2_000 * (step + 1), dtype)

    assert_steps_are_equal(optimizer, leaves(lengths, 1, dtype), grads, **more)


def test_lengths() -> None:
    """Steps equal the reference with all lengths in one call, and with single lengths.

    Every fourth algorithm is tried. If everything is tested, all are; laws try all with one length.
    """
    f32 = torch.float32
    for place, name in enumerate(one_in(4, TABLE)):
        optimizer = TABLE[name]
        threads = (1, 2, 4)[place % 3]
        with case(name=name, threads=threads), torch_threads(threads):
            require_equal(optimizer, LENGTHS, f32, steps=2)
    for one in pairs(length=(*LENGTHS[2:], 300_007), threads=[1, 4]):
        with case(**one), torch_threads(one["threads"]):
            require_equal(TABLE["adamw"], [one["length"]], f32, steps=2)


def test_sixteen_bits() -> None:
    """Each operation rounds to 16 bits, for any number of threads and any length."""
    for one in pairs(
        name=["selects", "swap", "numbers_on_the_left"],
        dtype=SHORT,
        threads=[1, 2, 4],
        lengths=[(70_001,), (3, 1_025, 80_003), (1,)],
    ):
        optimizer, dtype = RULES[one["name"]], one["dtype"]
        with case(**one), torch_threads(one["threads"]):
            if dtype == torch.bfloat16:
                assert explained(optimizer, torch.ones(300, dtype=dtype)).startswith("exact")
            require_equal(optimizer, one["lengths"], dtype)


def test_sixteen_bits_of_every_algorithm() -> None:
    """Steps in 16 bits equal the reference, also if eps rounds to zero and is a divisor.

    Each algorithm has one of the dtypes, by turns. If everything is tested, it has both.
    """
    lengths = (3, 4_007)
    for place, (name, optimizer) in enumerate(TABLE.items()):
        for dtype in SHORT if EVERYTHING else (SHORT[place % 2],):
            with case(name=name, dtype=dtype):
                require_equal(optimizer, lengths, dtype, steps=2)
                zeros = [torch.zeros(length, dtype=dtype) for length in lengths]
                start = leaves(lengths, 1, dtype)
                assert_steps_are_equal(optimizer, start, lambda _, zeros=zeros: zeros)


def test_many_leaves_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single call steps leaves of many lengths, and skips empty leaves."""
    calls: list[int] = []
    bound = LoopProgram.bound

    def noted(self: LoopProgram, table: Table, scalar_args: Any) -> Any:
        call = bound(self, table, scalar_args)

        def counted() -> object:
            calls.append(table.leaves)
            return call()

        return counted

    lengths = [(7 * k) % 211 for k in range(199)] + [33_333]
    assert explained(adamw(), noise(0, 300)).startswith("exact")
    monkeypatch.setattr(LoopProgram, "bound", noted)
    for executor, threads in [("compiled", 1), ("auto", 2)]:
        calls.clear()
        with case(executor=executor, threads=threads), torch_threads(threads):
            require_equal(adamw(), lengths, torch.float32, executor=executor, steps=2)
            assert calls == [sum(length > 0 for length in lengths)] * 4  # pure and in place


def test_several_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads with separate tensors share a loop that none of them has compiled yet."""
    monkeypatch.setattr(kernel, "_PROGRAMS", Cache())
    chosen = chain(clip_by_global_norm(0.7), adamw(weight_decay=0.3))

    def trained(executor: Any, index: int) -> Any:
        params = leaves((5_000, 33, 40_000), index)
        optimizer = chosen.using(executor=executor)
        state = optimizer.init(params)
        for step in range(5):
            optimizer.update_(params, leaves((5_000, 33, 40_000), 100 * step + index), state)
        return params, state

    found = together(*(lambda k=k: trained("compiled", k) for k in range(4)))
    for index, one in enumerate(found):
        assert_equal(one, trained("blocked", index))


def test_a_thread_goes_on_while_a_step_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop releases the GIL. A long switch interval ensures that nothing else does."""
    turns, done = [0], threading.Event()
    seen: list[int] = []
    bound_call = LoopProgram.bound

    def count() -> None:
        while not done.is_set():
            turns[0] += 1
            time.sleep(0)

    def noted(self: LoopProgram, table: Table, scalar_args: Any) -> Any:
        call = bound_call(self, table, scalar_args)

        def repeated() -> None:
            until = time.monotonic() + 240
            before = turns[0]
            sum(range(1_000_000))
            seen.append(turns[0] - before)  # the sum holds the GIL
            while turns[0] == before and time.monotonic() < until:
                call()
            seen.append(turns[0] - before)

        return repeated

    optimizer = sgd(0.1, momentum=0.9).using(executor="compiled")
    bound = optimizer.bind([torch.zeros(1_000_000)])
    bound.step([torch.ones(1_000_000)])
    monkeypatch.setattr(LoopProgram, "bound", noted)
    other, interval = threading.Thread(target=count), sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        other.start()
        bound.step([torch.ones(1_000_000)])
    finally:
        sys.setswitchinterval(interval)
        done.set()
        other.join()
    kept, gone_on = seen
    assert kept == 0 and gone_on > 0


def test_small_numbers_stay_small_numbers() -> None:
    """A compiled loop must not make its process flush denormals, as some compilers do."""
    optimizer = RULES["swap"].using(executor="compiled")
    for count in (9, 1 << 16):
        param = torch.ones(count)
        optimizer.update(param, param, optimizer.init(param))
        assert bool((torch.full((64,), 1e-40) * 0.5 > 0).all())
