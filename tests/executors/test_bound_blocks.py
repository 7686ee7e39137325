"""Bound chains that work in blocks of elements, over parameters that do not fill their last block.

A buffer has room between such a parameter and the next. What lies there has no part in the block.
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
from functional_optim.executors.compiled_step import CompiledStep
from functional_optim.executors.compiler import COMPILER, compilations

from .rules import Hyper, OneState
from .support import assert_same, noise
from .test_tracing import optimizer_of

BLOCK = 4


def of_blocks(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    """Each element goes by the sum of its block, in which nothing is one."""
    shifted = (g + 1.0).reshape(-1)
    rows = functional.pad(shifted, (0, -shifted.numel() % BLOCK)).view(-1, BLOCK)
    sums = rows.sum(dim=1, keepdim=True).expand(-1, BLOCK).reshape(-1)
    return p - c.lr * sums[: shifted.numel()].view_as(g), OneState(s.kept + g)


def of_six(g: Tensor, p: Tensor, s: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    """Each element less the largest of its six."""
    flat = g.reshape(-1)
    rows = functional.pad(flat, (0, -flat.numel() % 6), value=-9.0).view(-1, 6)
    most = rows.max(dim=1, keepdim=True).values.expand(-1, 6).reshape(-1)
    return g - most[: flat.numel()].view_as(g), s


def two_grains() -> Optimizer:
    """Blocks of six, then blocks of four: to be cut at multiples of twelve."""
    six = Transform(name="six", hyper=Hyper, transform=of_six, granularity=6)
    return chain(six(lr=0.1), optimizer_of(of_blocks, granularity=BLOCK).links[0])


OPTIMIZERS: dict[str, Optimizer] = {
    # Where all steps shrink, the room keeps the largest.
    "rprop": stored(rprop(0.1), state="int8"),
    # In the room, a momentum of minus zero.
    "momentum": stored(sgd(0.1, momentum=0.9, maximize=True), state="int8"),
    "adamw": stored(adamw(0.1), state="int8+stochastic"),
    "clipped": stored(chain(clip_by_global_norm(0.5), lion(0.1)), state="int8"),
    "own": optimizer_of(of_blocks, granularity=BLOCK),
    "two": two_grains(),
}
SIZES = {"a": (300,), "b": (2, 130), "c": (256,), "d": (), "e": (0,), "f": (1000,)}


def params() -> dict[str, Tensor]:
    return {name: noise(k, *size) for k, (name, size) in enumerate(SIZES.items())}


def grads(step: int) -> dict[str, Any]:
    """Of one sign in each step, another in the next; now and then some are missing."""
    sign = 1.0 if step % 2 else -1.0
    found: dict[str, Any] = {
        name: sign * (noise(k, *size).abs() + 0.1) for k, (name, size) in enumerate(SIZES.items())
    }
    return {**found, **dict.fromkeys({2: "b", 3: "af"}.get(step, ""))}


@pytest.mark.parametrize("executor", ["reference", "blocked", "auto"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_lies_between_has_no_part(name: str, executor: Any) -> None:
    optimizer = OPTIMIZERS[name].using(executor=executor)
    plain = params()
    bound, state = optimizer.bind(params()), optimizer.init(plain)
    assert_same(bound.state, state)
    for step in range(6):
        given = grads(step)
        totals = [optimizer.measure(plain, given, state)] if name == "clipped" else []
        bound.step(given, measured=totals)
        optimizer.update_(plain, given, state, measured=totals)
        assert_same((bound.params, bound.state), (plain, state))


@pytest.mark.parametrize("size", [(), (1,), (1, 1)])
def test_a_lone_element_keeps_the_shape_of_its_state(size: tuple[int, ...]) -> None:
    optimizer = OPTIMIZERS["adamw"].using(executor="blocked")
    param = noise(0, *size)
    state = optimizer.init(param)
    bound = optimizer.bind(param.clone(), state)
    assert_same(bound.state, state)
    bound.step(torch.ones(size))
    assert_same((bound.params, bound.state), optimizer.update(param, torch.ones(size), state))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements each call of a compiled step was for."""
    seen: list[int] = []
    call = CompiledStep.__call__

    def noted(self: CompiledStep, tensors: list[Tensor], uniform: Tensor) -> None:
        seen.append(tensors[0].numel())
        call(self, tensors, uniform)

    monkeypatch.setattr(CompiledStep, "__call__", noted)
    return seen


EIGHT_BITS = stored(lion(0.1), state="int8")
LONE = 70_001


def full(count: int) -> int:
    """The elements in full blocks: the end of a block that is not full is stepped otherwise."""
    return count - count % 256


def test_a_parameter_of_any_length_is_compiled(counted: list[int]) -> None:
    """One compilation for all lengths, of whole blocks or not."""
    COMPILER.idle()
    before = compilations()
    for count in (LONE, 512, 300):
        bound = EIGHT_BITS.using(executor="compile").bind({"w": noise(0, count)})
        plain = {"w": noise(0, count)}
        state = EIGHT_BITS.init(plain)
        for step in range(2):
            bound.step({"w": noise(step + 1, count)})
            EIGHT_BITS.update_(plain, {"w": noise(step + 1, count)}, state)
        assert counted == [full(count)] * 2
        counted.clear()
        torch.testing.assert_close(bound.params["w"], plain["w"], rtol=1e-6, atol=1e-6)
        made, want = bound.state.leaves["w"].stages[-1], state.leaves["w"].stages[-1]
        assert int((made.exp_avg.int() - want.exp_avg.int()).abs().max()) <= 1
        torch.testing.assert_close(made.exp_avg_scale, want.exp_avg_scale, rtol=1e-6, atol=0.0)
    assert compilations() - before <= 1


def test_several_that_do_not_fill_a_block_are_compiled_one_by_one(counted: list[int]) -> None:
    bound = EIGHT_BITS.using(executor="compile").bind([noise(0, 300), noise(1, 256), noise(2, 90)])
    bound.step([noise(3, 300), noise(4, 256), noise(5, 90)])
    assert counted == [256, 256]


def test_auto_compiles_it_and_says_so(counted: list[int]) -> None:
    bound = EIGHT_BITS.using(executor="auto").bind({"w": noise(0, LONE)})
    bound.step({"w": noise(1, LONE)})
    assert bound.ready(120)
    counted.clear()
    bound.step({"w": noise(2, LONE)})
    assert counted == [full(LONE)]
    assert bound.explain().startswith(f"w: {LONE:,} elements") and ": compile" in bound.explain()


def test_the_end_of_a_lane_is_not_a_block_of_something_else() -> None:
    """Whole units are compiled; the rest, perhaps a block that is not full, is the rule's."""
    optimizer = OPTIMIZERS["own"]
    for count in (16, 35, 61):
        bound = optimizer.using(executor="compile").bind(noise(0, count))
        bound.step(noise(1, count))
        want, state = optimizer.update(
            noise(0, count), noise(1, count), optimizer.init(noise(0, count))
        )
        torch.testing.assert_close(bound.params, want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            bound.state.leaves.stages[0].kept, state.leaves.stages[0].kept, rtol=1e-6, atol=1e-6
        )
