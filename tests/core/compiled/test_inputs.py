"""Inputs beside gradients in executors that compile, given at some steps or at all steps."""

from typing import Any

import optree
import pytest
import torch

from functional_optim import Optimizer, TorchOptimizer
from functional_optim.kernels import EXECUTORS
from tests.choices import case, each
from tests.composition.second_order import BOTH, cast, given_at, run_given
from tests.composition.trees import HOLES, STEPS, grads_at, params_of, two_parts
from tests.tensors import assert_same

COMPILING = [name for name in EXECUTORS if name not in ("reference", "blocked", "fused")]


@each(executor=COMPILING, name=list(BOTH), dtype=[torch.float32, torch.bfloat16, torch.complex64])
def test_they_are_the_reference(executor: Any, name: str, dtype: torch.dtype) -> None:
    """The pure update, the step in place, and TorchOptimizer give the bits of the reference."""
    make, every = BOTH[name]
    want = run_given(make().using(executor="reference"), every=every, missing=HOLES, dtype=dtype)
    optimizer = make().using(executor=executor)
    assert_same(run_given(optimizer, every=every, missing=HOLES, dtype=dtype), want)
    params: Any = cast(params_of(), dtype)
    leaves = {key: one.clone().requires_grad_() for key, one in params.items()}
    state, front_end = optimizer.init(params), TorchOptimizer(leaves.items(), optimizer)
    for step in range(STEPS):
        grads, given = cast((grads_at(step, missing=HOLES), given_at(step, every)), dtype)
        kept = optree.tree_map(torch.clone, given)
        for key, grad in grads.items():
            leaves[key].grad = grad
        optimizer.update_(params, grads, state, extra=given)
        front_end.step(extra=given)
        assert_same(given, kept)
    assert_same((params, state), want)
    assert_same({key: one.detach() for key, one in leaves.items()}, want[0])


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def graphs_of(optimizer: Optimizer, every: int | None) -> int:
    """Return how many graphs torch.compile makes for all steps, and check the parameters."""
    torch.compiler.reset()
    graphs = 0

    def counted(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    traced = torch.compile(optimizer.update, fullgraph=True, backend=counted)
    params: Any = params_of()
    want: Any = params_of()
    state, own = optimizer.init(params), optimizer.init(want)
    for step in range(STEPS):
        extra = {} if every is None else given_at(step, every)
        params, state = traced(params, grads_at(step), state, extra=extra)
        want, own = optimizer.update(want, grads_at(step), own, extra=extra)
    for name, one in params.items():
        torch.testing.assert_close(one, want[name])
    return graphs


def test_a_graph_makes_all_steps_that_are_given_the_same() -> None:
    """Steps with estimates need one graph, and steps without estimates need another."""
    for name, (make, every) in BOTH.items():
        with case(name=name):
            assert graphs_of(make(), every) == (1 if every == 1 else 2)


def test_a_graph_makes_all_steps_of_leaves_that_differ() -> None:
    assert graphs_of(two_parts(), None) == 1
