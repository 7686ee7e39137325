"""Numbers that change between steps, as inputs of the graphs that torch.compile makes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from functional_optim import Optimizer, adamw, chain, clip_by_global_norm, partition, sgd
from functional_optim.testing.compare import require_same
from tests.composition.trees import kind, params_of

from ..support import noise

ULPS = 4.0


pytestmark = pytest.mark.usefixtures("fresh_compiler")


SHAPES = {"weight": (4, 4), "bias": (4,)}


def parts() -> Optimizer:
    """Return an optimizer with one part for matrices and one part for all other leaves."""
    return partition({"matrices": sgd(0.1, momentum=0.9), "rest": adamw(0.1)}, kind)


GIVEN: dict[str, tuple[Callable[[], Optimizer], tuple[str, ...]]] = {
    "clipped": (lambda: chain(clip_by_global_norm(1.0), adamw()), ("max_norm", "lr")),
    "parts": (parts, ("matrices.lr", "rest.lr")),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_number_that_changes_makes_one_graph_more(name: str) -> None:
    """The first graph holds the number as a constant; the second graph takes any number."""
    make, names = GIVEN[name]
    optimizer, graphs = make(), 0

    def counting(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    def update(*trees: Any, number: float) -> Any:
        return optimizer.update(*trees, **dict.fromkeys(names, number))

    compiled = torch.compile(update, fullgraph=True, backend=counting)
    params = params_of(SHAPES)
    state = optimizer.init(params)
    for seed, number in enumerate((0.1, 0.05, 0.2, 1e-300, 0.3)):
        grads = {key: noise(seed, *one.shape).to(one.dtype) for key, one in params.items()}
        want = update(params, grads, state, number=number)
        got = compiled(params, grads, state, number=number)
        require_same("compiled and not", got, want, ULPS)
        params, state = want
    assert graphs == 2


def test_a_number_out_of_bounds_is_refused_as_ever() -> None:
    optimizer, params = sgd(), {"w": torch.ones(2)}
    state = optimizer.init(params)

    def update(number: float) -> Any:
        return optimizer.update(params, params, state, lr=number)

    compiled = torch.compile(update, backend="eager")
    compiled(0.1), compiled(0.2)
    for number in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="lr must be a .*number >= 0, got"):
            compiled(number)


@pytest.mark.parametrize("make", [adamw, parts])
def test_a_step_is_compiled_for_sizes_and_numbers_that_are_left_open(
    make: Callable[[], Optimizer],
) -> None:
    optimizer, params = make(), params_of(SHAPES)
    state = optimizer.init(params)
    compiled = torch.compile(optimizer.update, fullgraph=True, backend="eager", dynamic=True)
    got, want = compiled(params, params, state), optimizer.update(params, params, state)
    require_same("compiled and not", got, want, ULPS)
