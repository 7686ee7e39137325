"""Gradients in buckets, read where they lie."""

from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, adamw, chain, clip_by_global_norm, lion, sgd, stored
from functional_optim import stretches as module
from functional_optim.flat_layout import FlatLayout
from functional_optim.stretches import Stretches

from .support import assert_same, noise

Tree = dict[str, Tensor]

pytestmark = pytest.mark.usefixtures("both_ways")

SHAPES = {"a": (8, 4), "b": (8,), "c": (4, 8), "d": (), "e": (0, 3), "f": (2, 3, 4, 5), "g": (40,)}
BUCKETS = ("gf", "edc", "ba")
"""In the order in which a backward pass is done with them."""


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", 64)


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was gathered."""
    seen: list[Any] = []
    gather, at_once = FlatLayout.gather, FlatLayout.gather_at_once

    def noted(self: FlatLayout, grads: Any, **how: Any) -> None:
        seen.append(grads)
        gather(self, grads, **how)

    def noted_at_once(self: FlatLayout, grads: Any, read: Any) -> bool:
        done = at_once(self, grads, read)
        seen.extend([grads] * done)
        return done

    monkeypatch.setattr(FlatLayout, "gather", noted)
    monkeypatch.setattr(FlatLayout, "gather_at_once", noted_at_once)
    return seen


def params(dtype: torch.dtype = torch.float32) -> Tree:
    made = {name: noise(k, *size, dtype=dtype) for k, (name, size) in enumerate(SHAPES.items())}
    made["f"] = made["f"].to(memory_format=torch.channels_last)
    return made


def in_buckets(like: Tree, seed: int, buckets: tuple[str, ...] = BUCKETS) -> Tree:
    """Gradients as views of one tensor for each bucket, with the strides of their parameters."""
    found: Tree = {}
    for number, names in enumerate(buckets):
        pieces = [like[name] for name in names]
        real = [torch.view_as_real(one) if one.is_complex() else one for one in pieces]
        flat = noise(seed + number, sum(one.numel() for one in real), dtype=real[0].dtype)
        start = 0
        for name, one, whole in zip(names, real, pieces, strict=True):
            view = flat.as_strided(one.shape, one.stride(), start)
            found[name] = torch.view_as_complex(view) if whole.is_complex() else view
            start += one.numel()
    return {name: found[name] for name in like}


def follow(optimizer: Optimizer, tree: Tree, buckets: tuple[str, ...] = BUCKETS) -> Any:
    """The optimizer bound, in the order of these buckets."""
    bound = optimizer.bind(tree)
    for name, grad in in_buckets(tree, 0, buckets).items():
        tree[name].grad = grad
    bound.follow_gradients()
    return bound


OPTIMIZERS = {
    "sgd": sgd(0.1, momentum=0.9),
    "adamw": adamw(0.1),
    "lion": lion(0.1),
    "clipped": chain(clip_by_global_norm(0.5), lion(0.1)),
}


@pytest.mark.parametrize("executor", ["reference", "script", "blocked"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_leaf_by_leaf(name: str, executor: Any, gathers: list[Any]) -> None:
    """Buckets that move from step to step, a gradient that is missing now and then."""
    optimizer = OPTIMIZERS[name].using(executor=executor)
    bound, plain = follow(optimizer, params()), params()
    state = optimizer.init(plain)
    for step in range(5):
        given: dict[str, Any] = in_buckets(plain, 10 * step)
        given |= dict.fromkeys({2: "c", 3: "ag"}.get(step, ""))
        totals = [optimizer.measure(plain, given, state)] if name == "clipped" else []
        optimizer.update_(plain, given, state, measured=totals)
        bound.step(given, measured=totals)
        assert_same((bound.params, bound.state), (plain, state))
    assert gathers == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_of_other_dtypes(dtype: torch.dtype, gathers: list[Any]) -> None:
    optimizer = sgd(0.1, momentum=0.9).using(executor="blocked")
    bound, plain = follow(optimizer, params(dtype)), params(dtype)
    state = optimizer.init(plain)
    for step in range(3):
        given = in_buckets(plain, 10 * step)
        bound.step(given)
        optimizer.update_(plain, given, state)
        assert_same((bound.params, bound.state), (plain, state))
    assert gathers == []


def test_what_lies_between_gradients_is_not_stepped() -> None:
    """A complex parameter begins at an even element; the one before ends at an odd one."""
    tree = [noise(0, 201), noise(1, 200, dtype=torch.complex64)]
    bound = sgd(0.1).using(executor="blocked").bind(tree)
    (buffer,) = bound.layout.buffers
    assert [one.offset for one in buffer.segments] == [0, 202]
    memory = torch.ones(602)
    memory[201] = torch.nan
    grads = [memory[:201], torch.view_as_complex(memory[202:].view(-1, 2))]
    want, _ = bound.optimizer.update(tree, grads, bound.state)
    bound.step(grads)
    assert_same(bound.params, want)
    assert buffer.data[201] == 0.0


def test_what_was_made_before_is_kept() -> None:
    """Values, state, step counts and options; objects of the tree stay what they are."""
    optimizer = adamw(0.1).using(executor="blocked")
    tree, plain = params(), params()
    bound, state = optimizer.bind(tree), optimizer.init(plain)
    for step in range(4):
        if step == 2:
            bound.set_hyper(lr=0.01)
            optimizer = optimizer.replace(lr=0.01)
            for name, grad in in_buckets(tree, 0).items():
                tree[name].grad = grad
            bound.follow_gradients()
            assert all(bound.params[name] is tree[name] for name in tree)
        given = in_buckets(plain, 10 * step)
        bound.step(given)
        optimizer.update_(plain, given, state)
        assert_same((bound.params, bound.state), (plain, state))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_by_kernels_that_round_by_where_a_lane_ends(name: str, gathers: list[Any]) -> None:
    optimizer = OPTIMIZERS[name].using(executor="auto")
    bound, plain = follow(optimizer, params()), params()
    state = optimizer.init(plain)
    for step in range(3):
        given = in_buckets(plain, 10 * step)
        bound.step(given)
        optimizer.update_(plain, given, state)
        for path, one in plain.items():
            torch.testing.assert_close(bound.params[path], one)
    assert gathers == []


def test_one_lane_for_each_bucket() -> None:
    bound = follow(sgd(0.1).using(executor="blocked"), params())
    given = in_buckets(bound.params, 5)
    found = bound._own.gather([given[name] for name in SHAPES]).found
    assert [len(one.stretches) for one in found] == [3]


def test_gathered_where_that_is_less_work(
    monkeypatch: pytest.MonkeyPatch, gathers: list[Any]
) -> None:
    """Other orders, separate tensors, and little work: as without."""
    optimizer = sgd(0.1).using(executor="blocked")
    for buckets in (("gf", "edc", "ba"), ("abc", "def", "g")):
        bound = optimizer.bind(params())
        bound.step(in_buckets(bound.params, 1, buckets))
    bound = follow(optimizer, params())
    bound.step({name: noise(3, *size) for name, size in SHAPES.items()})
    assert len(gathers) == 3
    monkeypatch.setattr(module, "LARGE", 1 << 16)
    bound = follow(optimizer, params())
    bound.step(in_buckets(bound.params, 1))
    assert len(gathers) == 4


def test_gradients_laid_out_otherwise_are_gathered(gathers: list[Any]) -> None:
    optimizer = sgd(0.1).using(executor="blocked")
    bound, plain = follow(optimizer, params()), params()
    given = in_buckets(plain, 1)
    given["f"] = given["f"].contiguous()
    bound.step(given)
    assert len(gathers) == 1
    want, _ = optimizer.update(plain, given, optimizer.init(plain))
    assert_same(bound.params, want)


def test_gradients_that_are_parameters_are_copied_first(gathers: list[Any]) -> None:
    """In another order they would be read after they were written."""
    tree = {"a": noise(0, 64), "b": noise(1, 64)}
    plain = {name: one.clone() for name, one in tree.items()}
    optimizer = sgd(0.5, momentum=0.5).using(executor="blocked")
    bound = optimizer.bind(tree)
    bound.step({"a": tree["a"].detach(), "b": tree["b"].detach()})
    want, _ = optimizer.update(plain, plain, optimizer.init(plain))
    assert_same(bound.params, want)
    assert len(gathers) == 1


@pytest.mark.parametrize("grad", [None, torch.zeros(8).to_sparse()])
def test_every_parameter_has_a_place(grad: Any) -> None:
    tree = params()
    bound = sgd(0.1).bind(tree)
    for name, one in in_buckets(tree, 0).items():
        tree[name].grad = one
    tree["b"].grad = grad
    layout = bound.layout
    with pytest.raises(ValueError, match=r"parameter at 'b' must have a dense gradient"):
        bound.follow_gradients()
    assert bound.layout is layout


def test_stored_in_blocks(gathers: list[Any]) -> None:
    """Blocks do not begin where a bucket has no gaps: gathered, and right."""
    optimizer = stored(lion(0.1), state="int8").using(executor="blocked")
    bound, plain = follow(optimizer, params()), params()
    state = optimizer.init(plain)
    for step in range(2):
        given = in_buckets(plain, 10 * step)
        bound.step(given)
        optimizer.update_(plain, given, state)
        assert_same((bound.params, bound.state), (plain, state))


def test_the_search_is_made_once_for_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Any] = []
    search = Stretches._search

    def noted(self: Stretches, mine: Any) -> Any:
        searched.append(mine)
        return search(self, mine)

    monkeypatch.setattr(Stretches, "_search", noted)
    bound = follow(sgd(0.1).using(executor="blocked"), params())
    given = in_buckets(bound.params, 5)
    for _ in range(3):
        bound.step(given)
    assert len(searched) == 1


def test_gradients_that_are_state_are_copied_first(gathers: list[Any]) -> None:
    """What the momentum is at one place is the gradient of another."""
    optimizer = sgd(0.5, momentum=0.5).using(executor="blocked")
    bound = optimizer.bind({"a": noise(0, 64), "b": noise(1, 64)})
    plain = {"a": noise(0, 64), "b": noise(1, 64)}
    state = optimizer.init(plain)
    first = {"a": noise(2, 64), "b": noise(3, 64)}
    bound.step(first)
    optimizer.update_(plain, first, state)
    momentum = {name: bound.state.leaves[name].stages[-1].momentum_buffer[0] for name in plain}
    given = {name: one.clone() for name, one in momentum.items()}
    gathers.clear()
    bound.step(momentum)
    optimizer.update_(plain, given, state)
    assert_same((bound.params, bound.state), (plain, state))
    assert len(gathers) == 1
