"""Front-ends that step a tree: ``update``, ``update_``, and ``TorchOptimizer``."""

from typing import Any

import optree
import torch

from functional_optim import Optimizer, TorchOptimizer
from functional_optim.plan import tree_steps
from functional_optim.testing.subject import named_state

from ..tensors import assert_same
from .trees import Tree


def cloned(tree: Any) -> Any:
    return optree.tree_map(torch.clone, tree)


class Pure:
    """Steps by ``update``, each of which must leave its arguments alone."""

    def __init__(self, optimizer: Optimizer, params: Tree) -> None:
        self.optimizer, self.params = optimizer, params
        self.state = optimizer.init(params)

    def step(self, grads: Tree, **hyper: Any) -> None:
        given = [self.params, grads, self.state]
        before = cloned(given)
        with torch.no_grad():
            made = self.optimizer.update(self.params, grads, self.state, **hyper)
        assert_same(given, before)
        assert_apart(made, (self.params, self.state), {k for k, g in grads.items() if g is None})
        self.params, self.state = made

    def forget(self) -> None:
        """Delete all plans."""
        tree_steps._PLANS.clear()

    def entries(self, name: str) -> dict[str, Any]:
        """Return the state of a parameter by the names of torch.optim."""
        param, leaf = self.params[name], self.state.leaves[name]
        return named_state(self.optimizer, name, param, leaf) if leaf.stages else {}

    def assert_same(self, params: Tree, state: Any) -> None:
        assert_same([self.params, self.state], [params, state])


class InPlace(Pure):
    """Steps by ``update_``."""

    def step(self, grads: Tree, **hyper: Any) -> None:
        with torch.no_grad():
            self.optimizer.update_(self.params, grads, self.state, **hyper)


class Groups(Pure):
    """Steps by ``TorchOptimizer``."""

    def __init__(self, optimizer: Optimizer, params: Tree) -> None:
        self.optimizer = optimizer
        self.trained = {name: one.requires_grad_() for name, one in params.items()}
        self.torch = TorchOptimizer(self.trained.items(), optimizer)

    def step(self, grads: Tree, **hyper: Any) -> None:
        for name, grad in grads.items():
            self.trained[name].grad = grad
        short = {name.split(".")[-1]: value for name, value in hyper.items()}
        for group in self.torch.param_groups:
            group.update({name: value for name, value in short.items() if name in group})
        self.torch.step()
        self.torch.zero_grad()

    def forget(self) -> None:
        self.torch._steps.forget()

    def entries(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.torch.state[self.trained[name]]
        return found

    def assert_same(self, params: Tree, state: Any) -> None:
        assert_same({name: one.detach() for name, one in self.trained.items()}, params)
        assert self.torch.shared == self.optimizer.shared(state)
        for name, leaf in state.leaves.items():
            if int(leaf.step):  # the first step creates the state
                want = named_state(self.optimizer, name, params[name], leaf)
                found = {k: v for k, v in self.entries(name).items() if v is not None}
                assert int(found.pop("step")) == int(want.pop("step"))
                assert_same(found, want)


def assert_apart(made: Any, before: Any, missing: set[str]) -> None:
    """Make sure that results share no memory with the arguments.

    A leaf without a gradient is returned as the same object.
    """
    (params, state), (old, old_state) = made, before
    for name, param in params.items():
        own, old_own = state.leaves[name], old_state.leaves[name]
        if param is old[name]:
            assert own is old_own
            assert name in missing or not own.stages
            continue
        places = {one.data_ptr() for one in optree.tree_leaves((old[name], old_own)) if one.numel()}
        new = [one.data_ptr() for one in optree.tree_leaves((param, own)) if one.numel()]
        assert places.isdisjoint(new)
    shared = {one.data_ptr() for one in optree.tree_leaves(old_state.shared)}
    assert shared.isdisjoint(one.data_ptr() for one in optree.tree_leaves(state.shared))


FRONT_ENDS: dict[str, type[Pure]] = {"update": Pure, "update_": InPlace, "TorchOptimizer": Groups}
