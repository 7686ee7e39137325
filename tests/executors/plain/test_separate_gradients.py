"""Separate gradients, which steps read where they are."""

from typing import Any

import pytest
import torch

from functional_optim import adamw, chain, clip_by_global_norm, lion, scale_by_adam, sgd

from ...choices import case, pairs
from ..support import LARGE, Tree, Twins, assert_same, copied, noise, tensors

SHAPES = {"a": (8, 4), "b": (8,), "c": (4, 8), "d": (), "e": (0, 3), "f": (2, 3, 4, 5), "g": (40,)}
BUCKETS = ("gf", "edc", "ba")
"""Names of the gradients in each bucket, in the order in which backward finishes them."""


def params(dtype: torch.dtype = torch.float32) -> Tree:
    made = {name: noise(k, *size, dtype=dtype) for k, (name, size) in enumerate(SHAPES.items())}
    made["f"] = made["f"].to(memory_format=torch.channels_last)
    return made


def in_buckets(like: Tree, seed: int, without: str = "") -> dict[str, Any]:
    """Return gradients as views of one tensor per bucket, with the strides of their parameters."""
    found: dict[str, Any] = {}
    for number, names in enumerate(BUCKETS):
        pieces = [like[name] for name in names]
        real = [torch.view_as_real(one) if one.is_complex() else one for one in pieces]
        flat = noise(seed + number, sum(one.numel() for one in real), dtype=real[0].dtype)
        start = 0
        for name, one, whole in zip(names, real, pieces, strict=True):
            view = flat.as_strided(one.shape, one.stride(), start)
            found[name] = torch.view_as_complex(view) if whole.is_complex() else view
            start += one.numel()
    return {name: None if name in without else found[name] for name in like}


OPTIMIZERS = {
    "sgd": sgd(0.1, momentum=0.9),
    "adamw": adamw(0.1),
    "lion": lion(0.1),
    "clipped": chain(clip_by_global_norm(0.5), lion(0.1)),
}


def test_as_leaf_by_leaf(executors: Any) -> None:
    """Steps with moving buckets and missing gradients have the reference's bits."""
    for one in pairs(name=OPTIMIZERS, executor=executors):
        optimizer = OPTIMIZERS[one["name"]]
        twins = Twins(optimizer, params, one["executor"])
        for step in range(5):
            given = in_buckets(twins.plain, 10 * step, {2: "c", 3: "ag"}.get(step, ""))
            measured = one["name"] == "clipped"
            totals = [optimizer.measure(twins.plain, given, twins.state)] if measured else []
            with case(**one, step=step):
                twins.step(given, measured=totals)


def test_what_lies_between_gradients_is_not_stepped(executors: Any) -> None:
    """A complex gradient begins at an even element. Steps ignore the gap before it."""
    for executor in executors:
        twins = Twins(
            sgd(0.1), lambda: [noise(0, 201), noise(1, 200, dtype=torch.complex64)], executor
        )
        memory = torch.ones(602)
        memory[201] = torch.nan
        with case(executor=executor):
            twins.step([memory[:201], torch.view_as_complex(memory[202:].view(-1, 2))])


def test_no_gap_has_a_part_in_a_step(executors: Any) -> None:
    """A gap before a complex parameter would be divided by zero, and spoil a norm."""
    optimizer = chain(scale_by_adam(eps=0.0), clip_by_global_norm(1.0), sgd(lr=0.1))
    shapes = {"a": ((3,), torch.float32), "c": ((2,), torch.complex64)}
    given = {name: noise(9, *size, dtype=dtype) for name, (size, dtype) in shapes.items()}
    for one in pairs(executor=executors, own=[False, True]):
        made = {name: noise(1, *size, dtype=dtype) for name, (size, dtype) in shapes.items()}
        bound = optimizer.using(executor=one["executor"]).bind(made)
        want, _ = optimizer.using(executor="reference").update(
            copied(made), given, optimizer.init(copied(made))
        )
        for name, grad in given.items():
            bound.gradients[name].copy_(grad)
        bound.step(bound.gradients if one["own"] else given)
        with case(**one):
            for name, param in want.items():
                torch.testing.assert_close(bound.params[name], param, rtol=1e-6, atol=0.0)


def test_what_was_made_before_is_kept(executors: Any) -> None:
    """Steps keep values, state, step counts, options, and the objects of the tree."""
    for executor in executors:
        twins = Twins(adamw(0.1), params, executor)
        tree = dict(twins.bound.params)
        for step in range(4):
            if step == 2:
                twins.bound.set_hyper(lr=0.01)
                twins.optimizer = twins.optimizer.replace(lr=0.01)
                assert all(twins.bound.params[name] is tree[name] for name in tree)
            with case(executor=executor, step=step):
                twins.step(in_buckets(twins.plain, 10 * step))


def test_gradients_that_are_written_to_are_copied_first(executors: Any) -> None:
    """Gradients that are exchanged parameters or states are copied before the step writes them."""

    def made() -> Tree:
        return {"a": noise(0, 640), "b": noise(1, 640)}

    for executor in (one for one in executors if one != "reference"):
        twins = Twins(sgd(0.5, momentum=0.5), made, executor)
        own = {name: one.detach() for name, one in twins.bound.params.items()}
        twins.step({"a": own["b"], "b": own["a"]}, {"a": noise(1, 640), "b": noise(0, 640)})
        leaves = twins.bound.state.leaves
        momentum = {name: leaves[name].stages[-1].momentum_buffer[0] for name in own}
        given = {"a": momentum["b"], "b": momentum["a"]}
        with case(executor=executor):
            twins.step(given, copied(given))


def test_gradients_with_other_strides(executors: Any) -> None:
    for executor in executors:
        twins = Twins(adamw(0.1), lambda: [noise(0, 6, 5), noise(1, 4)], executor)
        with case(executor=executor):
            for _ in range(2):
                twins.step([noise(2, 5, 6).t(), noise(3, 4)])


def test_what_does_not_belong_is_refused_before_anything_is_written(executors: Any) -> None:
    wrong = [noise(3, 5), noise(3, 4, dtype=torch.float64), "gradient"]
    for one in pairs(executor=executors, grad=wrong):
        for steps in (0, 2):
            bound = adamw(0.1).using(executor=one["executor"]).bind([noise(0, 6, 5), noise(1, 4)])
            for number in range(steps):
                bound.step([noise(number, 6, 5), noise(number, 4)])
            before = copied(bound.params)
            versions = [param._version for param in bound.params]
            with case(**one, steps=steps):
                with pytest.raises((TypeError, ValueError), match=r"'1'"):
                    bound.step([noise(2, 6, 5), one["grad"]])
                assert_same(bound.params, before)
                assert [param._version for param in bound.params] == versions
                assert int(bound.state.leaves[0].step) == steps


@pytest.mark.parametrize("way", ["own", "given", "in place"])
def test_autograd_hears_of_what_is_written(executors: Any, way: str) -> None:
    """Autograd detects writes to parameters and state in first, planned, and partial steps."""
    for executor in executors:
        params, grads = ({"a": noise(k, 300), "b": noise(k + 1, LARGE)} for k in (0, 2))
        optimizer = adamw(lr=0.1).using(executor=executor)
        bound, state = optimizer.bind(copied(params)), optimizer.init(params)
        given = grads if way == "given" else copied(bound.gradients)
        if way == "own":
            given = bound.gradients
        kept = params if way == "in place" else bound.params
        weight = torch.ones((), requires_grad=True)
        for number in range(5):
            leaves = (state if way == "in place" else bound.state).leaves["a"].stages
            written = [kept["a"], *tensors(leaves)]
            followed = [(weight * one).sum() for one in written]
            versions = [one._version for one in given.values()]
            now = {**given, "b": None} if number == 4 else given
            if way == "in place":
                optimizer.update_(params, now, state)
            else:
                bound.step(now)
            assert [one._version for one in given.values()] == versions
            for one in followed:
                with (
                    case(executor=executor, number=number),
                    pytest.raises(RuntimeError, match="modified by an inplace operation"),
                ):
                    one.backward()


def test_chunks_of_before_do_not_join_what_has_been_stepped_apart_since(executors: Any) -> None:
    """Leaves with different step counts do not share a chunk, in any mix of steps."""
    dense = {name: noise(k, 40) for k, name in enumerate("abc")}
    apart = {name: noise(k, 80)[::2] for k, name in enumerate("abc")}
    for executor in executors:
        twins = Twins(adamw(lr=0.1), lambda: copied(dense), executor)
        for grads in ({**dense, "c": None}, apart, {**dense, "a": None}, apart, apart):
            twins.step(grads)
