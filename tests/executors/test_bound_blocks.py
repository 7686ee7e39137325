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
from functional_optim.block_ends import BlockEnds
from functional_optim.executors import LaneExecutor
from functional_optim.executors.exact.program import Program, Table
from functional_optim.executors.lane_executor import PIECE

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


def damped(block: int) -> Any:
    """Each element, damped by the spread of its block: no copy of an element changes that."""

    def damp(g: Tensor, p: Tensor, s: NoState, c: Hyper) -> tuple[Tensor, NoState]:
        flat = g.reshape(-1)
        room = (0, -flat.numel() % block)
        most = functional.pad(flat, room, value=-9.0).view(-1, block).amax(dim=1, keepdim=True)
        least = functional.pad(flat, room, value=9.0).view(-1, block).amin(dim=1, keepdim=True)
        spread = (most - least).expand(-1, block).reshape(-1)[: flat.numel()]
        return g / (1.0 + spread.view_as(g)), s

    name = f"damped{block}"
    return Transform(name=name, hyper=Hyper, transform=damp, granularity=block, fillable=True)


def of_vectors(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    """Right for vectors only, and for them only if there are elements."""
    rows = functional.pad(g, (0, -g.numel() % BLOCK)).view(-1, BLOCK)
    most = (rows - 0.0 * rows.max()).amax(dim=1, keepdim=True).expand(-1, BLOCK).reshape(-1)
    return p - c.lr * most[: g.numel()], OneState(s.kept + g)


def in_python(g: Tensor, p: Tensor, s: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    """The same as ``of_six``, but nothing can trace it."""
    return of_six(g, p, s, c) if float(g.sum()) < 1e9 else (g, s)


OPTIMIZERS: dict[str, Optimizer] = {
    # Where all steps shrink, the room keeps the largest.
    "rprop": stored(rprop(0.1), state="int8"),
    # In the room, a momentum of minus zero.
    "momentum": stored(sgd(0.1, momentum=0.9, maximize=True), state="int8"),
    "adamw": stored(adamw(0.1), state="int8+stochastic"),
    "clipped": stored(chain(clip_by_global_norm(0.5), lion(0.1)), state="int8"),
    "own": optimizer_of(of_blocks, granularity=BLOCK),
    "two": two_grains(),
    "filled": chain(damped(BLOCK)(lr=0.1), sgd(0.1)),
    # Among larger blocks, there would be smaller ones of copies alone.
    "two filled": chain(damped(4)(lr=0.1), damped(6)(lr=0.1), sgd(0.1)),
    "filled and kept": stored(chain(damped(BLOCK)(lr=0.1), lion(0.1)), state="int8"),
    "filled, then kept": chain(damped(BLOCK)(lr=0.1), stored(lion(0.1), state="int8")),
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
    """How many elements each lane had that an exact loop stepped."""
    seen: list[int] = []
    run = Program.run

    def noted(self: Program, table: Table, uniform: Any) -> None:
        seen.extend(table.lengths)
        run(self, table, uniform)

    monkeypatch.setattr(Program, "run", noted)
    return seen


EIGHT_BITS = stored(lion(0.1), state="int8")
LONE = 70_001


def filled(count: int) -> int:
    """The elements of all blocks, the last of which is filled up."""
    return -(-count // 256) * 256


@pytest.mark.parametrize("count", [LONE, 512, 300, 257, 90])
def test_a_parameter_of_any_length_is_compiled(count: int) -> None:
    """Of whole blocks or not: the last one is filled up."""
    bound = EIGHT_BITS.using(executor="compile").bind({"w": noise(0, count)})
    plain = {"w": noise(0, count)}
    state = EIGHT_BITS.init(plain)
    assert "exact; compiled" in bound.explain()
    for step in range(2):
        bound.step({"w": noise(step + 1, count)})
        EIGHT_BITS.update_(plain, {"w": noise(step + 1, count)}, state)
    assert_same((bound.params, bound.state), (plain, state))


def test_several_that_do_not_fill_a_block_are_one_lane(counted: list[int]) -> None:
    bound = EIGHT_BITS.using(executor="compile").bind([noise(0, 300), noise(1, 256), noise(2, 90)])
    counted.clear()  # of the self-check
    bound.step([noise(3, 300), noise(4, 256), noise(5, 90)])
    assert counted == [512 + 256 + 256]
    assert bound.explain().startswith("2 and 2 more: 646 elements")  # the shortest first


@pytest.mark.parametrize("source", ["buffers", "elsewhere"])
def test_between_parameters_there_are_zeros_again(source: str) -> None:
    """Also where one is so long that its gradient is read where it lies."""
    sizes = (300, 300, 90, (1 << 17) + 5, 7)
    tree, plain = ([noise(k, n) for k, n in enumerate(sizes)] for _ in range(2))
    optimizer = EIGHT_BITS.using(executor="blocked")
    bound, state = optimizer.bind(tree), optimizer.init(plain)
    for step in range(3):
        given = [noise(10 * step + k, n) for k, n in enumerate(sizes)]
        if source == "buffers":
            for view, grad in zip(bound.gradients, given, strict=True):
                view.copy_(grad)
        bound.step(bound.gradients if source == "buffers" else given)
        optimizer.update_(plain, given, state)
        assert_same((bound.params, bound.state), (plain, state))
        (buffer,) = bound.layout.buffers
        for flat in (buffer.data, *bound.layout.gradient_buffers()):
            between = torch.ones_like(flat, dtype=torch.bool)
            for one in buffer.segments:
                between[one.offset : one.offset + one.numel] = False
            assert between.any() and not flat[between].any()


def test_parameters_of_one_length_are_filled_up_by_one_call() -> None:
    """However they alternate."""
    bound = EIGHT_BITS.bind([noise(k, (300, 90)[k % 2]) for k in range(10)])
    (ends,) = bound._ends
    assert [tuple(one.shape) for one in ends._behind] == [(5, 166), (5, 212)] * 3
    (segments,) = (one.segments for one in bound.layout.buffers)
    assert [one.index % 2 for one in segments] == [1] * 5 + [0] * 5


@pytest.mark.parametrize("where", ["fill", "step"])
def test_between_them_there_are_zeros_also_after_a_failure(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [noise(0, 300), noise(1, 90)]
    bound = EIGHT_BITS.using(executor="blocked").override((0,), lr=0.2).bind(params)
    fill, calls = BlockEnds.fill, []

    def fails(self: Any, *_: Any) -> None:
        if where == "fill":
            calls.append(fill(self))
        if where == "step" or len(calls) == 2:
            raise MemoryError("no more")

    owner = {"fill": BlockEnds, "step": LaneExecutor}[where]
    monkeypatch.setattr(owner, {"fill": "fill", "step": "step_lane"}[where], fails)
    with pytest.raises(MemoryError):
        bound.step([noise(2, 300), noise(3, 90)])
    for buffer, flat in zip(bound.layout.buffers, bound.layout.gradient_buffers(), strict=True):
        (one,) = buffer.segments
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
    want, _ = optimizer.update(params, grads, optimizer.init(params))
    bound = optimizer.using(executor="compile").bind(params)
    bound.step(grads)
    assert "blocked; max has no formula that is torch's to the bit" in bound.explain()
    assert_same(bound.params, want)


def test_nothing_is_asked_of_a_lane_that_is_too_short_to_be_compiled() -> None:
    """A rule may not be able to step nothing at all."""
    for optimizer in (optimizer_of(of_vectors, granularity=BLOCK), EIGHT_BITS):
        bound = optimizer.using(executor="auto").bind([torch.zeros(0)])
        bound.step([torch.zeros(0)])
        assert "blocked" in bound.explain()


@pytest.mark.parametrize("executor", ["blocked", "auto"])
def test_what_is_not_traced_is_cut_at_blocks(executor: Any) -> None:
    six = Transform(name="six", hyper=Hyper, transform=in_python, granularity=6)
    optimizer = chain(six(lr=0.1), sgd(0.1)).using(executor=executor)
    count = PIECE + 100
    bound = optimizer.bind(noise(0, count))
    bound.step(noise(1, count))
    want, _ = optimizer.using(executor="reference").update(
        noise(0, count), noise(1, count), optimizer.init(noise(0, count))
    )
    assert_same(bound.params, want)


def test_gradients_that_lie_end_to_end_are_gathered_where_blocks_are_filled_up() -> None:
    """Behind them lies what must not be written to."""
    sizes = (256, 100_000, 100_000, 44)
    tree, plain = ([noise(k, n) for k, n in enumerate(sizes)] for _ in range(2))
    optimizer = EIGHT_BITS.using(executor="blocked")
    bound, state = optimizer.bind(tree), optimizer.init(plain)
    bucket = noise(9, sum(sizes) + 1000)
    before = bucket.clone()
    grads = list(bucket[: sum(sizes)].split(sizes))
    bound.step(grads)
    optimizer.update_(plain, grads, state)
    assert_same((bound.params, bound.state), (plain, state))
    assert torch.equal(bucket, before)


def test_of_leaves_that_are_not_bound_it_is_said_how_long_their_lane_is() -> None:
    """Filled up, they are worth the compiler."""
    leaves = [noise(k, 100) for k in range(200)]
    said = EIGHT_BITS.using(executor="auto").explain(leaves)
    assert said.startswith("200 parameters, 20,000 elements of torch.float32 on cpu, packed")
    assert "not worth starting the compiler" not in said


def test_leaves_that_are_not_bound_are_joined_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    step_lane = LaneExecutor.step_lane

    def noted(self: LaneExecutor, stages: Any, lane: Any, totals: Any) -> None:
        seen.append(lane.param.numel())
        step_lane(self, stages, lane, totals)

    monkeypatch.setattr(LaneExecutor, "step_lane", noted)
    given = params()
    joined = {"adamw": [512 + 512 + 256 + 1024], "own": [300 + 260 + 256, 1, 1000]}
    for name, lanes in joined.items():
        optimizer = OPTIMIZERS[name].using(executor="blocked")
        found = params()
        optimizer.update_(found, grads(1), optimizer.init(found))
        assert seen == lanes
        seen.clear()
        want, _ = OPTIMIZERS[name].update(given, grads(1), OPTIMIZERS[name].init(given))
        assert_same(found, want)


def test_auto_compiles_it_and_says_so(counted: list[int]) -> None:
    bound = EIGHT_BITS.using(executor="auto").bind({"w": noise(0, LONE)})
    bound.step({"w": noise(1, LONE)})
    counted.clear()
    bound.step({"w": noise(2, LONE)})
    assert counted == [LONE]  # where it lies; its last block is not full
    assert bound.explain().startswith(f"w: {LONE:,} elements") and ": exact; " in bound.explain()


def test_the_end_of_a_lane_is_not_a_block_of_something_else() -> None:
    """But what it is to the rule, a block that is not full."""
    optimizer = OPTIMIZERS["own"]
    for count in (16, 35, 61):
        bound = optimizer.using(executor="compile").bind(noise(0, count))
        bound.step(noise(1, count))
        want, state = optimizer.update(
            noise(0, count), noise(1, count), optimizer.init(noise(0, count))
        )
        assert_same((bound.params, bound.state.leaves.stages), (want, state.leaves.stages))


def test_a_lone_element_does_not_stand_for_longer_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has per block looks like what it has per element."""
    asked: list[tuple[int, int]] = []
    step_table = LaneExecutor.step_table

    def noted(self: LaneExecutor, stages: Any, like: Any, table: Any, totals: Any) -> bool:
        asked.append((like.param.numel(), table.leaves))
        return step_table(self, stages, like, table, totals)

    monkeypatch.setattr(LaneExecutor, "step_table", noted)
    given = [noise(k, size) for k, size in enumerate((1, 5000, 300))]
    want, _ = EIGHT_BITS.update(given, given, EIGHT_BITS.init(given))
    found = [one.clone() for one in given]
    EIGHT_BITS.using(executor="auto").update_(found, given, EIGHT_BITS.init(found))
    assert asked == [(5000, 3)]
    assert_same(found, want)
