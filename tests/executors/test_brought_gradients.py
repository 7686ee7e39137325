"""Many short gradients, brought to the step piece by piece, and never copied to the flat buffer."""

from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    adamw,
    brought_gradients,
    chain,
    clip_by_global_norm,
    lion,
    long_gradients,
    qhm,
    sgd,
    stored,
)
from functional_optim.brought_gradients import Brought
from functional_optim.executors import LaneExecutor

from .support import assert_same, noise

pytestmark = pytest.mark.usefixtures("with_loops")

SIZES = (
    (8,),
    (16, 8),
    (9,),
    (),
    (0, 3),
    (2, 3, 4),
    (20, 8),
    (7,),
    (3, 30),
    (5,),
    (90,),
    (95,),
    (60,),
)
LONG = 100  # two of them are

OPTIMIZERS = {
    "sgd": sgd(0.1, momentum=0.9),
    "adamw": adamw(0.1),
    "qhm": qhm(0.1),
}


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hundred elements of float64."""
    monkeypatch.setattr(brought_gradients, "PIECE_BYTES", 800)
    monkeypatch.setattr(brought_gradients, "LEAST_PIECES", 0)
    monkeypatch.setattr(long_gradients, "LONG", LONG)


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many gradients came each time."""
    seen: list[int] = []
    bring = Brought._bring

    def noted(self: Brought, buffer: Any, first: int, last: int, scratch: Tensor) -> None:
        seen.append(last - first + 1)
        scratch.fill_(torch.nan)  # nothing of the piece before is read
        bring(self, buffer, first, last, scratch)

    monkeypatch.setattr(Brought, "_bring", noted)
    return seen


def tree(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [noise(seed + k, *size, dtype=dtype) for k, size in enumerate(SIZES)]


def compare(optimizer: Optimizer, dtype: torch.dtype = torch.float32, steps: int = 3) -> Any:
    """Bound and unbound steps give the same; the bound optimizer."""
    plain = tree(0, dtype)
    bound, state = optimizer.bind(tree(0, dtype)), optimizer.init(plain)
    for flat in bound.layout.gradient_buffers():
        flat.fill_(torch.nan)
    for step in range(steps):
        given = tree(10 * step + 1, dtype)
        bound.step(given)
        optimizer.update_(plain, given, state)
        assert_same((bound.params, bound.state), (plain, state))
    return bound


@pytest.mark.parametrize("executor", ["script", "blocked"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_leaf_by_leaf(name: str, executor: Any, brought: list[int]) -> None:
    bound = compare(OPTIMIZERS[name].using(executor=executor))
    # All that are not long; the flat buffer was left alone.
    assert len(brought) >= 3 * 3
    assert sum(brought) == 3 * (len(SIZES) - 2)
    assert all(flat.isnan().all() for flat in bound.layout.gradient_buffers())


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_of_other_dtypes(dtype: torch.dtype, brought: list[int]) -> None:
    compare(sgd(0.1, momentum=0.9).using(executor="blocked"), dtype)
    assert sum(brought) == 3 * (len(SIZES) - (6 if dtype.is_complex else 2))


MIXED = {
    # A gap within a piece.
    "real, then complex": [101, 0, 9, 7, *[9j] * 15],
    # A piece that would begin with nothing, and then a gap.
    "nothing, then complex": [101, 0, *[9j] * 15],
}


@pytest.mark.parametrize("name", MIXED)
def test_real_and_complex_ones_in_one_buffer(name: str, brought: list[int]) -> None:
    """A complex one begins at an even element."""

    def made(seed: int) -> list[Tensor]:
        return [
            noise(seed + k, int(n.imag), dtype=torch.complex64)
            if isinstance(n, complex)
            else noise(seed + k, n)
            for k, n in enumerate(MIXED[name])
        ]

    optimizer = adamw(0.1).using(executor="blocked")
    plain = made(0)
    bound, state = optimizer.bind(made(0)), optimizer.init(plain)
    (buffer,) = bound.layout.buffers
    between = torch.ones(buffer.numel, dtype=torch.bool)
    for one in buffer.segments:
        between[one.offset : one.offset + one.numel] = False
    assert between.any()
    for step in range(2):
        given = made(10 * step + 1)
        bound.step(given)
        optimizer.update_(plain, given, state)
        assert_same((bound.params, bound.state), (plain, state))
        assert not buffer.data[between].any()
    assert sum(brought) == 2 * (len(plain) - 1)


def test_where_they_are_at_different_steps(brought: list[int]) -> None:
    """Lanes of one piece: it is brought once. Those that are missing are not."""
    optimizer = adamw(0.1).using(executor="blocked")
    plain = tree(0)
    bound, state = optimizer.bind(tree(0)), optimizer.init(plain)
    given: list[Any] = tree(1)
    given[2] = given[7] = None
    for grads, count in ((given, len(SIZES) - 4), (tree(2), len(SIZES) - 2)):
        bound.step(grads)
        optimizer.update_(plain, grads, state)
        assert_same((bound.params, bound.state), (plain, state))
        assert sum(brought) == count
        brought.clear()


def test_neighbours_that_share_memory_in_vain(brought: list[int]) -> None:
    """They lie in another order, so that nothing is to be read where it lies."""
    optimizer = adamw(0.1).using(executor="blocked")
    plain = tree(0)
    bound, state = optimizer.bind(tree(0)), optimizer.init(plain)
    memory = noise(1, sum(one.numel() for one in plain))
    pieces = memory.split([one.numel() for one in reversed(plain)])
    given = [one.view(like.shape) for one, like in zip(reversed(pieces), plain, strict=True)]
    bound.step(given)
    optimizer.update_(plain, given, state)
    assert_same((bound.params, bound.state), (plain, state))
    assert sum(brought) == len(SIZES) - 2


LEFT: dict[str, Optimizer] = {
    "measured": chain(clip_by_global_norm(0.5), lion(0.1)),
    "blocks of elements": stored(lion(0.1), state="int8"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_reads_gradients_otherwise_gathers(name: str, brought: list[int]) -> None:
    optimizer = LEFT[name].using(executor="blocked")
    bound, params = optimizer.bind(tree(0)), tree(0)
    state = optimizer.init(params)
    totals = [optimizer.measure(params, tree(1), state)] if name == "measured" else []
    bound.step(tree(1), measured=totals)
    optimizer.update_(params, tree(1), state, measured=totals)
    assert_same((bound.params, bound.state), (params, state))
    assert brought == []


@pytest.mark.parametrize("where", ["parameters", "gradients", "state"])
def test_gradients_in_what_is_written_are_copied_before(where: str, brought: list[int]) -> None:
    """A later piece would read what the step of an earlier one has written."""
    optimizer = sgd(0.1, momentum=0.9).using(executor="blocked")
    plain = tree(0)
    bound, state = optimizer.bind(tree(0)), optimizer.init(plain)
    bound.step(tree(1))
    optimizer.update_(plain, tree(1), state)
    brought.clear()
    (buffer,) = bound.layout.buffers
    flat = {
        "parameters": buffer.data,
        "gradients": bound.layout.gradient_buffers()[0],
        "state": bound.state.leaves[0].stages[-1].momentum_buffer[0],
    }[where]
    given = tree(2)
    given[9] = flat.view(-1)[:5]
    copies = [grad.clone() for grad in given]
    bound.step(given)
    optimizer.update_(plain, copies, state)
    assert_same((bound.params, bound.state), (plain, state))
    assert brought == []


def test_a_gradient_that_another_thread_resizes_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = sgd(0.1).using(executor="blocked")
    bound = optimizer.bind({f"p{k}": one for k, one in enumerate(tree(0))})
    given = {f"p{k}": one for k, one in enumerate(tree(1))}
    step_lane = LaneExecutor.step_lane

    def meanwhile(self: LaneExecutor, *args: Any) -> None:
        step_lane(self, *args)
        for grad in given.values():
            grad.resize_(0)

    monkeypatch.setattr(LaneExecutor, "step_lane", meanwhile)
    with pytest.raises(RuntimeError, match="gradients from 'p.*' on have changed while a step was"):
        bound.step(given)
    # Autograd knows of those that were stepped.
    assert all(one._version > 0 for one in bound.params.values() if one.numel())


def test_a_gradient_whose_memory_is_gone_meanwhile_is_not_read(monkeypatch: Any) -> None:
    bound = sgd(0.1).using(executor="blocked").bind(tree(0))
    given = tree(1)
    step_lane = LaneExecutor.step_lane

    def emptied(self: LaneExecutor, *args: Any) -> None:
        step_lane(self, *args)
        for grad in given:
            grad.untyped_storage().resize_(0)

    monkeypatch.setattr(LaneExecutor, "step_lane", emptied)
    with pytest.raises(RuntimeError, match="have changed while a step was made"):
        bound.step(given)


def test_a_gradient_that_does_not_fit_is_named_before_anything_is_written() -> None:
    bound = sgd(0.1).using(executor="blocked").bind({f"p{k}": x for k, x in enumerate(tree(0))})
    given = {f"p{k}": one for k, one in enumerate(tree(1))}
    with pytest.raises(ValueError, match="'p9'"):
        bound.step({**given, "p9": torch.zeros(6)})
    assert_same(list(bound.params.values()), tree(0))


def test_what_is_brought_is_explained() -> None:
    said = sgd(0.1).using(executor="blocked").bind(tree(0)).explain()
    assert f"{len(SIZES) - 2} short gradients are brought into the cache in pieces" in said
    assert "2 long gradients are read where they lie" in said


def test_a_piece_has_room_for_any_short_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert long_gradients.LONG * torch.float64.itemsize <= brought_gradients.PIECE_BYTES


def test_few_are_gathered(monkeypatch: pytest.MonkeyPatch, brought: list[int]) -> None:
    """They are in the cache anyway when the step reads them."""
    monkeypatch.setattr(brought_gradients, "LEAST_PIECES", 8)
    compare(sgd(0.1).using(executor="blocked"))
    assert brought == []


def test_another_number_of_threads(brought: list[int]) -> None:
    """It decides how long pieces are."""
    bound = compare(sgd(0.1).using(executor="blocked"), steps=1)
    before = list(brought)
    brought.clear()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        bound.step(tree(5))
    finally:
        torch.set_num_threads(threads)
    assert len(brought) < len(before)
    assert sum(brought) == sum(before)
