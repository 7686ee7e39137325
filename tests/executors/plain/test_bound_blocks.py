"""Bound chains that work in blocks, with parameters that do not fill their last block.

The buffer has padding after such a parameter. The padding must not affect the block.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from functional_optim import (
    NoState,
    Optimizer,
    Transform,
    adamw,
    chain,
    clip_by_global_norm,
    lion,
    rprop,
    sgd,
    stored,
)
from functional_optim.kernels import pieces

from ...choices import case, pairs
from ..rules import Hyper, OneState, optimizer_of
from ..support import Twins, assert_same, broken_off, noise

BLOCK = 4


def of_blocks(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    """Step each element by the sum of its block, in which a zero gradient counts as one."""
    shifted = (g + 1.0).reshape(-1)
    rows = functional.pad(shifted, (0, -shifted.numel() % BLOCK)).view(-1, BLOCK)
    sums = rows.sum(dim=1, keepdim=True).expand(-1, BLOCK).reshape(-1)
    return p - c.lr * sums[: shifted.numel()].view_as(g), OneState(s.kept + g)


def of_six(g: Tensor, p: Tensor, s: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    """Subtract the largest element of its block of six from each element."""
    flat = g.reshape(-1)
    rows = functional.pad(flat, (0, -flat.numel() % 6), value=-9.0).view(-1, 6)
    most = rows.max(dim=1, keepdim=True).values.expand(-1, 6).reshape(-1)
    return g - most[: flat.numel()].view_as(g), s


def two_grains() -> Optimizer:
    """Return a chain with blocks of six and of four, which is cut at multiples of twelve."""
    six = Transform(name="six", hyper=Hyper, transform=of_six, granularity=6)
    return chain(six(lr=0.1), optimizer_of(of_blocks, granularity=BLOCK).links[0])


def damped(block: int) -> Any:
    """Return a transform that damps by the spread of a block, which copies do not change."""

    def damp(g: Tensor, p: Tensor, s: NoState, c: Hyper) -> tuple[Tensor, NoState]:
        flat = g.reshape(-1)
        room = (0, -flat.numel() % block)
        most = functional.pad(flat, room, value=-9.0).view(-1, block).amax(dim=1, keepdim=True)
        least = functional.pad(flat, room, value=9.0).view(-1, block).amin(dim=1, keepdim=True)
        spread = (most - least).expand(-1, block).reshape(-1)[: flat.numel()]
        return g / (1.0 + spread.view_as(g)), s

    name = f"damped{block}"
    return Transform(name=name, hyper=Hyper, transform=damp, granularity=block)


def of_vectors(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    """Step correctly only for vectors with at least one element."""
    rows = functional.pad(g, (0, -g.numel() % BLOCK)).view(-1, BLOCK)
    most = (rows - 0.0 * rows.max()).amax(dim=1, keepdim=True).expand(-1, BLOCK).reshape(-1)
    return p - c.lr * most[: g.numel()], OneState(s.kept + g)


def in_python(g: Tensor, p: Tensor, s: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    """Compute ``of_six`` in a way that cannot be traced."""
    return of_six(g, p, s, c) if float(g.sum()) < 1e9 else (g, s)


EIGHT_BITS = stored(lion(0.1), state="int8")
OPTIMIZERS: dict[str, Optimizer] = {
    # If all steps shrink, the padding keeps the largest.
    "rprop": stored(rprop(0.1), state="int8"),
    # The padding gets a momentum of minus zero.
    "momentum": stored(sgd(0.1, momentum=0.9, maximize=True), state="int8"),
    "adamw": stored(adamw(0.1), state="int8+stochastic"),
    "clipped": stored(chain(clip_by_global_norm(0.5), lion(0.1)), state="int8"),
    "own": optimizer_of(of_blocks, granularity=BLOCK),
    "two": two_grains(),
    "filled": chain(damped(BLOCK)(lr=0.1), sgd(0.1)),
    # Some of the smaller blocks within larger ones would contain only copies.
    "two filled": chain(damped(4)(lr=0.1), damped(6)(lr=0.1), sgd(0.1)),
    "filled and kept": stored(chain(damped(BLOCK)(lr=0.1), lion(0.1)), state="int8"),
    "filled, then kept": chain(damped(BLOCK)(lr=0.1), stored(lion(0.1), state="int8")),
}
SIZES = {"a": (300,), "b": (2, 130), "c": (256,), "d": (), "e": (0,), "f": (1000,)}


def params() -> dict[str, Tensor]:
    return {name: noise(k, *size) for k, (name, size) in enumerate(SIZES.items())}


def grads(step: int) -> dict[str, Any]:
    """Return gradients whose sign alternates by step; some are missing."""
    sign = 1.0 if step % 2 else -1.0
    found: dict[str, Any] = {
        name: sign * (noise(k, *size).abs() + 0.1) for k, (name, size) in enumerate(SIZES.items())
    }
    return {**found, **dict.fromkeys({1: "b", 2: "af"}.get(step, ""))}


@pytest.mark.parametrize("source", ["buffers", "elsewhere"])
def test_what_lies_between_has_no_part(source: str, executors: Any) -> None:
    for one in pairs(name=OPTIMIZERS, executor=executors):
        optimizer = OPTIMIZERS[one["name"]]
        twins = Twins(optimizer, params, one["executor"])
        twins.require_same()
        for step in range(3):
            given, totals = grads(step if source == "elsewhere" else 0), []  # or none is missing
            if one["name"] == "clipped":
                totals = [optimizer.measure(twins.plain, given, twins.state)]
            stepped = given
            if source == "buffers":
                stepped = twins.bound.gradients
                for name, grad in given.items():
                    stepped[name].copy_(grad)
            with case(**one, step=step):
                twins.step(stepped, given, measured=totals)


def test_a_lone_element_keeps_the_shape_of_its_state() -> None:
    for size in ((), (1,), (1, 1)):
        twins = Twins(OPTIMIZERS["adamw"], lambda size=size: noise(0, *size), "blocked")
        with case(size=size):
            twins.require_same()
            twins.step(torch.ones(size))


@pytest.mark.parametrize("source", ["buffers", "elsewhere"])
def test_between_parameters_there_are_zeros(source: str) -> None:
    """The padding stays zero, also beside a gradient that is long enough to be read in place."""
    sizes = (300, 300, 90, (1 << 17) + 5, 7)
    twins = Twins(EIGHT_BITS, lambda: [noise(k, n) for k, n in enumerate(sizes)], "blocked")
    (buffer,) = twins.bound.layout.buffers
    for step in range(2):
        given = [noise(10 * step + k, n) for k, n in enumerate(sizes)]
        if source == "buffers":
            for view, grad in zip(twins.bound.gradients, given, strict=True):
                view.copy_(grad)
        twins.step(twins.bound.gradients if source == "buffers" else given, given)
        for flat in (buffer.data, *twins.bound.layout.gradient_buffers()):
            between = torch.ones_like(flat, dtype=torch.bool)
            for one in buffer.segments:
                between[one.offset : one.offset + one.numel] = False
            assert between.any() and not flat[between].any()


@pytest.mark.parametrize("written", ["nothing", "one chunk"])
def test_between_them_there_are_zeros_also_after_a_failure(
    written: str, executors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The padding of parameters and gradients stays zero if a step fails."""
    for executor in (one for one in executors if one != "reference"):
        params = [noise(0, 300), noise(1, 90)]
        bound = EIGHT_BITS.using(executor=executor).override((0,), lr=0.2).bind(params)
        for again in (True, False):  # the first step compiles all kernels
            for number, view in enumerate(bound.gradients):
                view.copy_(noise(2 + number, *view.shape))
            if again:
                bound.step(bound.gradients)
        before = [param.clone() for param in params]
        with case(executor=executor), monkeypatch.context() as patch:
            broken_off(patch, 2 if written == "one chunk" else 1)
            with pytest.raises(MemoryError):
                bound.step(bound.gradients)
            moved = [not torch.equal(*one) for one in zip(params, before, strict=True)]
            assert sum(moved) == (written == "one chunk")
            for buffer, flat in zip(
                bound.layout.buffers, bound.layout.gradient_buffers(), strict=True
            ):
                (one,) = buffer.segments
                assert buffer.data[one.numel :].numel() > 0
                assert not buffer.data[one.numel :].any() and not flat[one.numel :].any()
                assert flat[: one.numel].any()


def test_autograd_may_go_on_with_gradients_that_are_only_read() -> None:
    params, other = noise(0, 300).requires_grad_(), noise(1, 300).requires_grad_()
    bound = EIGHT_BITS.using(executor="blocked").bind([params])
    bound.layout.attach_gradients()
    loss = (params.grad * other).sum() if params.grad is not None else other.sum()
    bound.step(bound.gradients)
    loss.backward()
    assert other.grad is not None


def test_a_rule_for_vectors_is_stepped_in_blocks_and_not_compiled() -> None:
    optimizer = optimizer_of(of_vectors, granularity=BLOCK)
    params, grads = [noise(0, 400)], [noise(1, 400)]
    want, _ = optimizer.using(executor="reference").update(params, grads, optimizer.init(params))
    bound = optimizer.using(executor="compiled").bind(params)
    bound.step(grads)
    assert "blocked; max has no formula that is torch's to the bit" in bound.explain()
    assert_same(bound.params, want)


def test_nothing_is_asked_of_a_chunk_that_is_too_short_to_be_compiled() -> None:
    """A rule is not called for an empty chunk, because the rule could fail."""
    for optimizer in (optimizer_of(of_vectors, granularity=BLOCK), EIGHT_BITS):
        bound = optimizer.using(executor="auto").bind([torch.zeros(0)])
        bound.step([torch.zeros(0)])
        assert "blocked" in bound.explain()


def test_what_is_not_traced_is_cut_at_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 1000)
    six = Transform(name="six", hyper=Hyper, transform=in_python, granularity=6)
    for executor in ("blocked", "auto"):
        with case(executor=executor):
            Twins(chain(six(lr=0.1), sgd(0.1)), lambda: noise(0, 1100), executor).step(
                noise(1, 1100)
            )


def test_memory_behind_gradients_that_lie_end_to_end_is_not_written_to(executors: Any) -> None:
    """A step does not write past adjacent gradients."""
    chains = {"eight bits": EIGHT_BITS, "own": OPTIMIZERS["own"], "adamw": adamw(0.1)}
    sizes = (256, 3_000, 2_000, 44)
    for one in pairs(name=chains, executor=executors):
        optimizer = chains[one["name"]]
        twins = Twins(
            optimizer, lambda: [noise(k, n) for k, n in enumerate(sizes)], one["executor"]
        )
        bucket = noise(9, sum(sizes) + 1000)
        before = bucket.clone()
        with case(**one):
            for _ in range(2):
                twins.step(list(bucket[: sum(sizes)].split(sizes)))
                assert torch.equal(bucket, before)
