"""A bound optimizer does the same as ``update_``, for any actions between two steps."""

from typing import Any

import torch
from hypothesis import given
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
from functional_optim.core.state import LeafState, State

from ...choices import case, examples, pairs
from ..bound_tree import NAMES, full, parameters, some
from ..rules import RULES, VARIANTS, Hyper, OneState
from ..support import Twins, assert_same, copied, noise


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
"""Pointwise rule with one scalar of state per leaf."""

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


class Pair(Twins):
    """Twins over every kind of parameter, with actions between two steps."""

    def __init__(self, optimizer: Optimizer, executor: Any) -> None:
        super().__init__(optimizer, parameters, executor)
        self.params = self.bound.params

    def require_same(self) -> None:
        super().require_same()
        strides = [None if p is None else p.stride() for p in parameters().values()]
        assert [None if p is None else p.stride() for p in self.params.values()] == strides

    def full(self, seed: int) -> None:
        self.step(full(seed))

    def some(self, seed: int, without: frozenset[str]) -> None:
        self.step(some(seed, without))

    def own_gradients(self, seed: int) -> None:
        for name, grad in full(seed).items():
            if grad is not None:
                self.bound.gradients[name].copy_(grad)
        self.step(self.bound.gradients, full(seed))

    def own_and_others(self, seed: int, without: frozenset[str]) -> None:
        """Step with gradients in the flat buffer, gradients elsewhere, and missing gradients."""
        given = some(seed, without)
        for name in ("a", "g", "e"):
            if given[name] is not None:
                self.bound.gradients[name].copy_(given[name])
                given[name] = self.bound.gradients[name]
        self.step(given, some(seed, without))

    def exchanged(self, seed: int, without: frozenset[str]) -> None:
        """Step with two gradients in the flat buffer, at each other's position."""
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
        self.step(full(seed), lr=0.01 * seed)

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
        """Bind the optimizer again from its state, as after a checkpoint."""
        state = copied(self.bound.state)
        self.bound.release()
        self.bound = self.bound.optimizer.bind(self.params, state)


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
seeds = st.integers(1, 40)
subsets = st.frozensets(st.sampled_from(NAMES))
ACTIONS = [
    *(st.tuples(st.just(name), seeds, subsets) for name in WITH_SUBSET),
    *(st.tuples(st.just(name), seeds) for name in WITHOUT_SUBSET),
]


def test_every_action_between_plain_steps(executors: Any) -> None:
    chosen = [one for one in executors if one != "reference"]
    for one in pairs(name=["amsgrad", "a number of state"], executor=chosen):
        pair = Pair(OPTIMIZERS[one["name"]], one["executor"])
        for number, action in enumerate((*WITH_SUBSET, *WITHOUT_SUBSET)):
            with case(**one, action=action):
                for again in range(2):  # the second step only makes its one call
                    pair.own_gradients(number + again)
                getattr(pair, action)(3, *([frozenset("be")] * (action in WITH_SUBSET)))
                pair.require_same()
                pair.some(number, frozenset("ag") if number % 2 else frozenset())


@examples(18)
@given(st.sampled_from([*OPTIMIZERS]), st.lists(st.one_of(ACTIONS), min_size=2, max_size=7))
def test_any_sequence(executors: Any, name: str, actions: list[Any]) -> None:
    for executor in executors:
        pair = Pair(OPTIMIZERS[name], executor)
        for action, *arguments in actions:
            getattr(pair, action)(*arguments)
            pair.require_same()


def test_measured_chains(executors: Any) -> None:
    """Given totals lead to equal bits. Computed totals can round differently."""
    for one in pairs(name=MEASURED, executor=executors, given=[True, False]):
        optimizer = MEASURED[one["name"]].using(executor=one["executor"])
        params, plain = ({k: p for k, p in parameters().items() if k != "j"} for _ in range(2))
        made, state = optimizer.bind(params), optimizer.init(plain)
        for seed, without in ((1, "j"), (2, "jbe"), (3, "j")):
            grads = {k: some(seed, frozenset(without))[k] for k in plain}
            totals = [optimizer.measure(plain, grads, state)] if one["given"] else []
            made.step(grads, measured=totals)
            optimizer.update_(plain, grads, state, measured=totals)
            with case(**one, seed=seed):
                if totals:
                    assert_same((params, made.state), (plain, state))
                for key, param in plain.items():
                    if param is not None:
                        room = 8 * torch.finfo(param.dtype).eps
                        torch.testing.assert_close(params[key], param, rtol=room, atol=room)


def test_sparse_gradients_now_and_then(executors: Any) -> None:
    adagrad = VARIANTS["adagrad"].replace(weight_decay=0.0)
    for one in pairs(executor=executors, optimizer=[sgd(0.1), sgd(0.1, momentum=0.9), adagrad]):
        twins = Twins(one["optimizer"], lambda: [noise(0, 6, 3), noise(1, 4)], one["executor"])
        for k in range(4):
            rows = torch.tensor([[0, 4, 4, k]])
            sparse = torch.sparse_coo_tensor(rows, noise(k, 4, 3), (6, 3), check_invariants=True)
            with case(**one, step=k):
                twins.step(
                    [sparse if k % 2 else noise(9 + k, 6, 3), None if k == 1 else noise(k, 4)]
                )


def test_everything_missing_is_no_step(executors: Any) -> None:
    for executor in executors:
        made = adamw(0.1).using(executor=executor).bind({"a": noise(0, 5), "b": noise(1, 3)})
        made.step({"a": None, "b": None})
        assert_same(made.params, {"a": noise(0, 5), "b": noise(1, 3)})
        made.step({"a": noise(2, 5), "b": noise(3, 3)})
        assert [int(leaf.step) for leaf in made.state.leaves.values()] == [1, 1]
        made.step()  # no gradient was ever computed
        assert [int(leaf.step) for leaf in made.state.leaves.values()] == [1, 1]


def test_only_empty_parameters(executors: Any) -> None:
    for executor in executors:
        made = adamw(0.1).using(executor=executor).bind([torch.ones(0), torch.ones(2, 0)])
        made.step([torch.ones(0), torch.ones(2, 0)])
        assert [int(leaf.step) for leaf in made.state.leaves] == [1, 1]
        assert isinstance(made.explain(), str)


def itself_rule(param: Tensor, grad: Tensor, state: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return param - c.lr * (grad + state.kept), OneState(state.kept + grad)


ITSELF = Rule(
    name="itself",
    hyper=Hyper,
    state=OneState,
    init=lambda param, hyper: OneState(param.float()),  # no copy for float32
    rule=itself_rule,
)


def test_state_that_begins_as_the_parameter_itself_has_memory_of_its_own(executors: Any) -> None:
    """Binding copies such a state, for buffers of any length and for a given state."""
    for one in pairs(executor=executors, lengths=[(1,), (100,), (300, 7, 5000)], given=[0, 1]):
        optimizer = chain(ITSELF(lr=0.5)).using(executor=one["executor"])
        twins = Twins(
            optimizer,
            lambda lengths=one["lengths"]: [noise(k, n) for k, n in enumerate(lengths)],
            bind=(lambda made, params: made.bind(params, made.init(params)))
            if one["given"]
            else None,
        )
        with case(**one):
            for step in range(3):
                twins.step([noise(10 * step + k, n) for k, n in enumerate(one["lengths"])])
            memory = {p.untyped_storage().data_ptr() for p in twins.bound.params}
            for leaf in twins.bound.state.leaves:
                assert leaf.stages[0].kept.untyped_storage().data_ptr() not in memory


def test_the_state_is_one_that_update_takes_and_saves() -> None:
    optimizer = OPTIMIZERS["amsgrad"]
    made = optimizer.using(executor="blocked").bind(parameters())
    made.step(full(1))
    assert isinstance(made.state, State)
    assert isinstance(made.state.leaves["a"], LeafState) and made.state.leaves["h"] is None
    want = optimizer.using(executor="reference").update(
        copied(made.params), full(2), copied(made.state)
    )
    made.step(full(2))
    assert_same((made.params, made.state), want)
