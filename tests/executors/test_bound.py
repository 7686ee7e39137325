"""A bound optimizer does what update_ does, whatever happens between two steps."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from functional_optim import (
    Optimizer,
    Rule,
    adamw,
    chain,
    clip_by_global_norm,
    decoupled_weight_decay,
    sgd,
)
from functional_optim.bound import BoundOptimizer
from functional_optim.state import LeafState, State

from .bound_tree import NAMES, full, parameters, some
from .rules import RULES, VARIANTS, Hyper, OneState
from .support import assert_same, copied, noise


def rows_rule(param: Tensor, grad: Tensor, state: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    kept = state.kept + torch.nn.functional.pad(grad.abs().reshape(-1), [0, 1]).amax()
    return param - c.lr * grad / (kept + 1.0), OneState(kept)


def rows_init(param: Tensor, hyper: Hyper) -> OneState:
    return OneState(torch.zeros((), dtype=param.dtype))


MATRIX = Rule(
    name="rows",
    hyper=Hyper,
    state=OneState,
    init=rows_init,
    rule=rows_rule,
    kind="per_matrix",
)


def paced_rule(param: Tensor, grad: Tensor, state: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    kept = state.kept / 2 + 1
    return param - c.lr * kept * grad, OneState(kept)


PACED = Rule(name="paced", hyper=Hyper, state=OneState, init=rows_init, rule=paced_rule)
"""Pointwise, with one number of state per leaf."""

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": sgd(0.1, momentum=0.9, weight_decay=0.1),
    "adamw": VARIANTS["adamw"],
    "amsgrad": VARIANTS["adam amsgrad"],
    "rprop": VARIANTS["rprop"],
    "rotate": RULES["rotate"],
    "reuses": RULES["reuses"],
    "per matrix": chain(decoupled_weight_decay(0.1), MATRIX(lr=0.1)),
    "a number of state": chain(PACED(lr=0.1)),
    "schedule": adamw(lr=lambda made: 0.1 / (1 + made)),
    "tensor": adamw(lr=torch.tensor(0.1, dtype=torch.float64)),
    "override": adamw(0.1).override(("b",), lr=0.3).override(("e",), weight_decay=0.5),
}
MEASURED: dict[str, Optimizer] = {
    "in front": chain(clip_by_global_norm(0.5), VARIANTS["adamw"]),
    "in the middle": chain(decoupled_weight_decay(0.3), clip_by_global_norm(0.5), RULES["swap"]),
    "behind a rule": chain(RULES["reuses"].links[0], clip_by_global_norm(0.7), sgd(0.1)),
}


class Pair:
    """A bound optimizer, and one that is not, over equal trees."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.params = parameters()
        self.bound: BoundOptimizer = optimizer.bind(self.params)
        self.plain = parameters()
        self.state = optimizer.init(self.plain)

    def step(self, given: Any, plain: Any, **hyper: Any) -> None:
        self.bound.step(given, **hyper)
        self.optimizer.update_(self.plain, plain, self.state, **hyper)

    def require_same(self) -> None:
        assert_same(self.params, self.plain)
        assert_same(self.bound.state, self.state)
        strides = [None if p is None else p.stride() for p in parameters().values()]
        assert [None if p is None else p.stride() for p in self.params.values()] == strides

    def full(self, seed: int) -> None:
        self.step(full(seed), full(seed))

    def some(self, seed: int, without: frozenset[str]) -> None:
        self.step(some(seed, without), some(seed, without))

    def own_gradients(self, seed: int) -> None:
        for name, grad in full(seed).items():
            if grad is not None:
                self.bound.gradients[name].copy_(grad)
        self.step(self.bound.gradients, full(seed))

    def own_and_others(self, seed: int, without: frozenset[str]) -> None:
        """Some gradients lie where they belong, some elsewhere, some nowhere."""
        given = some(seed, without)
        for name in ("a", "g", "e"):
            if given[name] is not None:
                self.bound.gradients[name].copy_(given[name])
                given[name] = self.bound.gradients[name]
        self.step(given, some(seed, without))

    def exchanged(self, seed: int, without: frozenset[str]) -> None:
        """Gradients that lie in the buffer, at each other's places."""
        plain = some(seed, without - {"a", "i"})
        given = dict(plain)
        self.bound.gradients["a"].copy_(plain["i"])
        self.bound.gradients["i"].copy_(plain["a"])
        given["a"], given["i"] = self.bound.gradients["i"], self.bound.gradients["a"]
        self.step(given, plain)

    def attributes(self, seed: int, without: frozenset[str]) -> None:
        for name, grad in some(seed, without).items():
            if grad is not None or name in without:
                self.params[name].grad = grad
        self.step(None, some(seed, without))

    def attached(self, seed: int) -> None:
        for param in self.params.values():
            if param is not None:
                param.requires_grad_().grad = None
        self.bound.layout.attach_gradients()
        for name, grad in full(seed).items():
            if grad is None:
                continue
            if self.params[name].grad is None:
                self.params[name].grad = grad
            else:
                self.params[name].grad.copy_(grad)
        self.step(None, full(seed))
        for param in self.params.values():
            if param is not None:
                param.requires_grad_(requires_grad=False).grad = None

    def other_hypers(self, seed: int) -> None:
        self.step(full(seed), full(seed), lr=0.01 * seed)

    def set_hyper(self, seed: int) -> None:
        self.bound.set_hyper(lr=0.001 * seed)
        self.optimizer = self.optimizer.replace(lr=0.001 * seed)

    def load(self, seed: int) -> None:
        self.bound.load_state(copied(self.state))

    def take_own_state(self, seed: int) -> None:
        self.bound.load_state(self.bound.state)

    def change_state(self, seed: int) -> None:
        for state in (self.bound.state, self.state):
            for stage in state.leaves["a"].stages:
                for field in stage:
                    for tensor in field if isinstance(field, list) else [field]:
                        tensor.mul_(0.5)

    def change_step(self, seed: int) -> None:
        for state in (self.bound.state, self.state):
            state.leaves["b"].step.fill_(seed)

    def change_param(self, seed: int) -> None:
        with torch.no_grad():
            for params in (self.params, self.plain):
                params["e"].add_(1.0)

    def rebind(self, seed: int) -> None:
        """The optimizer bound anew, from its state, as after a checkpoint."""
        state = copied(self.bound.state)
        self.bound.release()
        self.bound = self.optimizer.bind(self.params, state)


seeds = st.integers(1, 40)
subsets = st.frozensets(st.sampled_from(NAMES))
WITH_SUBSET = ("some", "own_and_others", "exchanged", "attributes")
WITHOUT_SUBSET = (
    "full",
    "own_gradients",
    "attached",
    "other_hypers",
    "set_hyper",
    "load",
    "take_own_state",
    "change_state",
    "change_step",
    "change_param",
    "rebind",
)
ACTIONS = [
    *(st.tuples(st.just(name), seeds, subsets) for name in WITH_SUBSET),
    *(st.tuples(st.just(name), seeds) for name in WITHOUT_SUBSET),
]


@pytest.mark.parametrize("executor", ["reference", "script", "blocked"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_sequence(name: str, executor: Any) -> None:
    @settings(derandomize=True, max_examples=8, database=None)
    @given(actions=st.lists(st.one_of(ACTIONS), min_size=2, max_size=7))
    def check(actions: list[Any]) -> None:
        pair = Pair(OPTIMIZERS[name].using(executor=executor))
        for action, *arguments in actions:
            getattr(pair, action)(*arguments)
            pair.require_same()

    check()


@pytest.mark.parametrize("action", [*WITH_SUBSET, *WITHOUT_SUBSET])
def test_every_action_is_tried_once(action: str) -> None:
    """Each alone, between two plain steps."""
    for executor in ("reference", "blocked"):
        pair = Pair(OPTIMIZERS["amsgrad"].using(executor=executor))
        pair.full(1)
        getattr(pair, action)(3, *([frozenset("be")] if action in WITH_SUBSET else []))
        pair.full(2)
        pair.require_same()
        pair.some(4, frozenset("ag"))
        pair.full(5)
        pair.require_same()


@pytest.mark.parametrize("executor", ["reference", "script", "blocked"])
@pytest.mark.parametrize("name", MEASURED)
def test_measured_chains_with_given_totals(name: str, executor: Any) -> None:
    optimizer = MEASURED[name].using(executor=executor)
    params, plain = parameters(), parameters()
    del params["j"], plain["j"]  # else everything goes leaf by leaf
    bound, state = optimizer.bind(params), optimizer.init(plain)
    for seed, without in ((1, ""), (2, "be"), (3, "")):
        grads = some(seed, frozenset(without))
        del grads["j"]
        total = optimizer.measure(plain, grads, state)
        bound.step(grads, measured=[total])
        optimizer.update_(plain, grads, state, measured=[total])
        assert_same((params, bound.state), (plain, state))


@pytest.mark.parametrize("executor", ["reference", "blocked"])
@pytest.mark.parametrize("name", MEASURED)
def test_measured_chains_sum_over_buffers(name: str, executor: Any) -> None:
    """The sum is rounded in the order in which it is taken, in double precision."""
    optimizer = MEASURED[name].using(executor=executor)
    params, plain = parameters(), parameters()
    for tree in (params, plain):
        del tree["j"]
    bound, state = optimizer.bind(params), optimizer.init(plain)
    for seed, without in ((1, ""), (2, "be"), (3, "")):
        grads = some(seed, frozenset(without))
        del grads["j"]
        bound.step(grads)
        optimizer.update_(plain, grads, state)
        for key, param in plain.items():
            if param is not None:
                eps = torch.finfo(param.dtype).eps
                torch.testing.assert_close(params[key], param, rtol=8 * eps, atol=8 * eps)


def embedding(optimizer: Optimizer, executor: Any) -> None:
    params, plain = ({"w": noise(0, 6, 3), "v": noise(1, 4)} for _ in range(2))
    bound, state = optimizer.using(executor=executor).bind(params), optimizer.init(plain)
    for k in range(4):
        rows = torch.tensor([[0, 4, 4, k]])
        sparse = torch.sparse_coo_tensor(rows, noise(k, 4, 3), (6, 3), check_invariants=True)
        dense = noise(9 + k, 6, 3)
        grads = {"w": sparse if k % 2 else dense, "v": None if k == 1 else noise(20 + k, 4)}
        bound.step(grads)
        optimizer.using(executor=executor).update_(plain, grads, state)
        assert_same((params, bound.state), (plain, state))


@pytest.mark.parametrize("executor", ["reference", "script", "blocked", "auto"])
def test_sparse_gradients_now_and_then(executor: Any) -> None:
    embedding(sgd(0.1), executor)
    embedding(sgd(0.1, momentum=0.9), executor)
    embedding(VARIANTS["adagrad"].replace(weight_decay=0.0), executor)


def test_everything_missing_is_no_step() -> None:
    for executor in ("reference", "blocked", "auto", "fused"):
        bound = adamw(0.1).using(executor=executor).bind({"a": noise(0, 5), "b": noise(1, 3)})
        bound.step({"a": None, "b": None})
        assert_same(bound.params, {"a": noise(0, 5), "b": noise(1, 3)})
        bound.step({"a": noise(2, 5), "b": noise(3, 3)})
        assert [int(leaf.step) for leaf in bound.state.leaves.values()] == [1, 1]
        bound.step()  # no gradient was ever computed
        assert [int(leaf.step) for leaf in bound.state.leaves.values()] == [1, 1]


def test_only_empty_parameters() -> None:
    for executor in ("reference", "script", "blocked", "auto", "fused"):
        bound = (
            adamw(0.1).using(executor=executor).bind({"a": torch.ones(0), "b": torch.ones(2, 0)})
        )
        bound.step({"a": torch.ones(0), "b": torch.ones(2, 0)})
        assert [int(leaf.step) for leaf in bound.state.leaves.values()] == [1, 1]
        assert isinstance(bound.explain(), str)


def test_the_state_is_one_that_update_takes_and_saves() -> None:
    optimizer = OPTIMIZERS["amsgrad"]
    bound = optimizer.using(executor="blocked").bind(parameters())
    bound.step(full(1))
    state = bound.state
    assert isinstance(state, State)
    assert isinstance(state.leaves["a"], LeafState)
    plain, grads = copied(bound.params), full(2)
    want = optimizer.update(plain, grads, copied(state))
    bound.step(grads)
    assert_same((bound.params, bound.state), want)
    assert bound.state.leaves["h"] is None
