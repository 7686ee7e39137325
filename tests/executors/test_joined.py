"""Separate gradients, read where they lie in one call, or copied where that cannot be."""

from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    adamw,
    bound_joined,
    chain,
    clip_by_global_norm,
    lion,
    sgd,
    stored,
)
from functional_optim.executors import auto
from functional_optim.executors.exact import kernel
from functional_optim.flat_layout import FlatLayout

from .support import assert_same, copied, noise, tensors

Tree = dict[str, Tensor]

pytestmark = pytest.mark.usefixtures("both_ways")

SHAPES = {"a": (8, 4), "b": (8,), "c": (4, 8), "d": (), "e": (0, 3), "f": (2, 3, 4, 5), "g": (40,)}
BUCKETS = ("gf", "edc", "ba")
"""In the order in which a backward pass is done with them."""


@pytest.fixture(autouse=True)
def few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_joined, "LEAST", 1)
    monkeypatch.setattr(auto, "WORTH_COMPILING", 1)


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was copied into the flat gradient."""
    seen: list[Any] = []
    gather, at_once = FlatLayout.gather, FlatLayout.gather_at_once

    def noted(self: FlatLayout, grads: Any) -> None:
        seen.append(grads)
        gather(self, grads)

    def noted_at_once(self: FlatLayout, grads: Any) -> bool:
        done = at_once(self, grads)
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


@pytest.mark.parametrize("executor", ["reference", "script", "blocked", "compile", "auto"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_leaf_by_leaf(name: str, executor: Any) -> None:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("executor", ["compile", "auto"])
def test_nothing_is_copied(dtype: torch.dtype, executor: Any, gathers: list[Any]) -> None:
    """Also not where gradients are missing, and parameters part by that in their step counts."""
    optimizer = sgd(0.1, momentum=0.9).using(executor=executor)
    bound, plain = optimizer.bind(params(dtype)), params(dtype)
    state = optimizer.init(plain)
    for step in range(6):
        given: dict[str, Any] = in_buckets(plain, 10 * step)
        given |= dict.fromkeys({1: "c", 2: "ag", 4: "abcdefg"}.get(step, ""))
        bound.step(given)
        optimizer.update_(plain, given, state)
        assert_same((bound.params, bound.state), (plain, state))
    assert gathers == []


@pytest.mark.parametrize("storage", [{"state": "int8"}, {"state": "bfloat16"}])
def test_stored(storage: Any, gathers: list[Any]) -> None:
    """Blocks begin anew with each parameter."""
    optimizer = stored(lion(0.1), **storage).using(executor="auto")
    tree, plain = ({"a": noise(0, 300), "b": noise(1, 7), "c": noise(2, 512)} for _ in range(2))
    bound, state = optimizer.bind(tree), optimizer.init(plain)
    for step in range(3):
        given = {
            name: noise(10 * step + k, *one.shape) for k, (name, one) in enumerate(tree.items())
        }
        bound.step(given)
        optimizer.using(executor="reference").update_(plain, given, state)
        assert_same((bound.params, bound.state), (plain, state))
    assert gathers == []


def test_what_lies_between_gradients_is_not_stepped() -> None:
    """A complex parameter begins at an even element; the one before ends at an odd one."""
    tree = [noise(0, 201), noise(1, 200, dtype=torch.complex64)]
    bound = sgd(0.1).using(executor="auto").bind(tree)
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
    optimizer = adamw(0.1).using(executor="auto")
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


def test_gradients_that_are_parameters_are_copied_first(gathers: list[Any]) -> None:
    """In another order they would be read after they were written."""
    tree = {"a": noise(0, 64), "b": noise(1, 64)}
    plain = {name: one.clone() for name, one in tree.items()}
    optimizer = sgd(0.5, momentum=0.5).using(executor="auto")
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


def test_gradients_that_are_state_are_copied_first(gathers: list[Any]) -> None:
    """What the momentum is at one place is the gradient of another."""
    optimizer = sgd(0.5, momentum=0.5).using(executor="auto")
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


def test_other_strides_are_copied(gathers: list[Any]) -> None:
    tree = {"a": noise(0, 6, 5), "b": noise(1, 4)}
    plain = {name: one.clone() for name, one in tree.items()}
    optimizer = adamw(0.1).using(executor="auto")
    bound, state = optimizer.bind(tree), optimizer.init(plain)
    given = {"a": noise(2, 5, 6).t(), "b": noise(3, 4)}
    bound.step(given)
    optimizer.using(executor="reference").update_(plain, given, state)
    assert_same((bound.params, bound.state), (plain, state))
    assert len(gathers) == 1


@pytest.mark.parametrize("grad", [noise(3, 5), noise(3, 4, dtype=torch.float64), "gradient"])
def test_what_does_not_belong_is_refused_before_anything_is_written(grad: Any) -> None:
    tree = {"a": noise(0, 6, 5), "b": noise(1, 4)}
    before = {name: one.clone() for name, one in tree.items()}
    bound = adamw(0.1).using(executor="auto").bind(tree)
    with pytest.raises((TypeError, ValueError), match=r"'b'"):
        bound.step({"a": noise(2, 6, 5), "b": grad})
    assert_same(bound.params, before)
    assert int(bound.state.leaves["a"].step) == 0


def test_few_elements_are_stepped_by_a_loop_that_others_have_pushed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto, "WORTH_COMPILING", 1 << 12)
    optimizer = adamw(lr=0.1).using(executor="auto")
    given = {"a": noise(0, 5000), "b": noise(1, 10)}
    plain = {name: one.clone() for name, one in given.items()}
    bound, state = optimizer.bind(given), optimizer.init(plain)
    for grads in (copied(plain), {"a": None, "b": noise(2, 10)}, {"a": None, "b": noise(3, 10)}):
        bound.step(grads)
        optimizer.using(executor="reference").update_(plain, grads, state)
        assert_same((bound.params, bound.state), (plain, state))
        kernel._PROGRAMS.clear()


@pytest.mark.parametrize("executor", ["reference", "blocked", "auto", "compile"])
@pytest.mark.parametrize("own", [False, True])
def test_autograd_sees_that_state_was_written_to(own: bool, executor: Any) -> None:
    """Whatever way a step is made, of all parameters or of some."""
    bound = adamw(lr=0.1).using(executor=executor).bind({"a": noise(0, 300), "b": noise(1, 40)})
    bound.gradients["a"].fill_(1.0), bound.gradients["b"].fill_(1.0)
    weight = torch.ones(300, requires_grad=True)
    for number in range(8):
        followed = [(weight * one).sum() for one in tensors(bound.state.leaves["a"].stages)]
        grads = bound.gradients if own else {"a": noise(2, 300), "b": noise(3, 40)}
        bound.step({**grads, "b": None} if number == 7 else grads)
        for one in followed:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                one.backward()


def test_lanes_of_before_do_not_join_what_has_been_stepped_apart_since() -> None:
    """Steps that copy gradients, between them one that reads them where they lie."""
    optimizer = adamw(lr=0.1).using(executor="auto")
    tree = {"a": noise(0, 40), "b": noise(1, 40), "c": noise(2, 40)}
    plain = {name: one.clone() for name, one in tree.items()}
    bound, state = optimizer.bind(tree), optimizer.init(plain)
    dense = {name: noise(k, 40) for k, name in enumerate("abc")}
    apart = {name: noise(k, 80)[::2] for k, name in enumerate("abc")}
    for grads in ({**dense, "c": None}, apart, {**dense, "a": None}, apart, apart):
        bound.step(grads)
        optimizer.using(executor="reference").update_(plain, grads, state)
        assert_same((bound.params, bound.state), (plain, state))
