"""Default executor of an optimizer, and the executor that a user selects."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from functional_optim import Optimizer, TorchOptimizer, accumulate, adamw, chain, ema, sgd
from functional_optim.kernels import KernelExecutor, chunks
from functional_optim.plan import tree_steps
from tests.choices import case

from .support import assert_same, noise

Tree = dict[str, Any]
GRADS: Tree = {name: noise(k + 9, 40) for k, name in enumerate("ab")}


class Seen(TorchDispatchMode):
    """Mode that records the names of called operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def tree_of() -> Tree:
    return {name: noise(k, 40) for k, name in enumerate("ab")}


def pure(optimizer: Optimizer) -> Tree:
    params, state = tree_of(), optimizer.init(tree_of())
    for _ in range(3):
        params, state = optimizer.update(params, GRADS, state)
    return params


def in_place(optimizer: Optimizer) -> Tree:
    params = tree_of()
    state = optimizer.init(params)
    for _ in range(3):
        optimizer.update_(params, GRADS, state)
    return params


def bound(optimizer: Optimizer) -> Tree:
    params = tree_of()
    made = optimizer.bind(params)
    for _ in range(3):
        made.step(GRADS)
    return params


def in_groups(optimizer: Optimizer) -> Tree:
    params = {name: one.requires_grad_() for name, one in tree_of().items()}
    made = TorchOptimizer(params.items(), optimizer)
    for _ in range(3):
        for name, one in params.items():
            one.grad = GRADS[name].clone()
        made.step()
    return {name: one.detach() for name, one in params.items()}


DOORS: dict[str, Callable[[Optimizer], Tree]] = {
    "update": pure,
    "update_": in_place,
    "bind": bound,
    "TorchOptimizer": in_groups,
}


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record each chunk, and each table of leaves, that a kernel steps.

    Leaves are stepped by a table once their kernel is compiled, which an earlier test may have
    caused.
    """
    found: list[str] = []
    bind_chunk, bind_table = KernelExecutor.bind_chunk, KernelExecutor.bind_table

    def noted(self: KernelExecutor, stages: Sequence[Any], chunk: Any, totals: Any) -> Any:
        found.append(chunk.name)
        return bind_chunk(self, stages, chunk, totals)

    def noted_table(self: KernelExecutor, stages: Sequence[Any], like: Any, elements: int) -> Any:
        bound = bind_table(self, stages, like, elements)
        if bound is not None:
            found.append(like.name)
        return bound

    monkeypatch.setattr(KernelExecutor, "bind_chunk", noted)
    monkeypatch.setattr(KernelExecutor, "bind_table", noted_table)
    monkeypatch.setattr(chunks, "LARGE", 1)  # smaller leaves would step in lists
    monkeypatch.setattr(tree_steps, "_PLANS", [])  # known plans have kernels already
    return found


def test_kernels_step_in_every_door_unless_told_otherwise(by_kernels: list[str]) -> None:
    """Fault 21: kernels step by default, and no kernel steps if the reference is selected."""
    want = pure(adamw(0.1).using(executor="reference"))
    assert adamw().executor == "auto" and by_kernels == []
    for name, door in DOORS.items():
        with case(door=name):
            by_kernels.clear()
            tree_steps._PLANS.clear()  # the plan of another door has kernels already
            assert_same(door(adamw(0.1)), want)
            assert by_kernels
            by_kernels.clear()
            assert_same(door(adamw(0.1).using(executor="reference")), want)
            assert by_kernels == []


def test_the_reference_steps_composed_optimizers_leaf_by_leaf(by_kernels: list[str]) -> None:
    """Fault 21: the selected executor also steps chains with gates and averages."""
    optimizer = chain(accumulate(2), sgd(0.1), ema(0.9))
    for name in ("update", "update_", "TorchOptimizer"):
        with case(door=name):
            by_kernels.clear()
            tree_steps._PLANS.clear()
            DOORS[name](optimizer)
            assert by_kernels
            by_kernels.clear()
            DOORS[name](optimizer.using(executor="reference"))
            assert by_kernels == []


def test_explain_does_not_say_that_anyone_asked() -> None:
    """Fault 21: the text names the executor that runs, and not that a user asked for it."""
    params = tree_of()
    reference = adamw().using(executor="reference")
    for said in (adamw().explain(params), adamw().bind(tree_of()).explain()):
        assert "asked" not in said and "reference" not in said
    for said in (reference.explain(params), reference.bind(tree_of()).explain()):
        assert said.endswith(": reference, leaf by leaf")
    on_meta = {name: one.to("meta") for name, one in params.items()}
    assert adamw().explain(on_meta).endswith(": reference, leaf by leaf")
    assert repr(adamw()) == repr(adamw().using(executor="auto"))
    assert "reference" in repr(reference)


def test_who_follows_operations_sees_those_of_the_stages(by_kernels: list[str]) -> None:
    """torch.func, autograd, dispatch modes and meta tensors get the operations of the stages."""
    optimizer, param, grad = adamw(0.1), noise(0, 5), noise(1, 5)
    state = optimizer.init(param)

    def loss(param: Any) -> Any:
        return optimizer.update(param, grad, state)[0].sum()

    torch.func.grad(loss)(param)
    torch.func.vmap(lambda one: optimizer.update(one, one, state)[0])(noise(2, 3, 5))
    leaf = param.clone().requires_grad_()
    torch.autograd.grad(loss(leaf), leaf)
    with Seen() as seen:
        optimizer.update(param, grad, state)
    assert "aten.lerp.Scalar" in seen.names
    meta = param.to("meta")
    assert optimizer.update(meta, meta, optimizer.init(meta))[0].is_meta
    assert by_kernels == []
