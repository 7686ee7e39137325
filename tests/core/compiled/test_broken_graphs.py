"""Pure steps that torch.compile cannot trace as one graph, and that give the same numbers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, Rule, chain, partition, sgd
from functional_optim.core.stage import NoState
from functional_optim.testing.compare import require_same
from tests.composition.trees import COMPOSED, kind, params_of

from ..support import noise

ULPS = 4.0


pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Hyper(NamedTuple):
    lr: float


def breaking_rule(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    torch._dynamo.graph_break()
    return param - c.lr * grad, state


BREAKING = Rule(name="breaking", hyper=Hyper, rule=breaking_rule)

BROKEN: dict[str, Callable[[], Optimizer]] = {
    "a rule in a part": lambda: partition(
        {"matrices": chain(BREAKING(lr=0.1)), "rest": sgd(0.1)}, kind
    ),
}
SHAPES = {"weight": (4, 4), "bias": (4,)}
GATES = ("accumulate", "finite", "sam", "batches of parts")


def stepped(update: Callable[..., Any], optimizer: Optimizer, steps: int = 5) -> Any:
    params = params_of(SHAPES)
    state = optimizer.init(params)
    for seed in range(steps):
        grads = {name: noise(seed, *one.shape).to(one.dtype) for name, one in params.items()}
        params, state = update(params, grads, state)
    return params, state


@pytest.mark.parametrize("name", [*BROKEN, *GATES])
def test_a_step_with_a_graph_break_is_the_same(name: str) -> None:
    """Parameters and state agree with the uncompiled step, although only parts are compiled."""
    optimizer = (BROKEN.get(name) or COMPOSED[name])()
    compiled = torch.compile(optimizer.update, backend="eager")
    steps = 5 if name in GATES else 2  # gates open at some of the steps
    got, want = (stepped(one, optimizer, steps) for one in (compiled, optimizer.update))
    require_same("compiled and not", got, want, 0.0 if name in GATES else ULPS)


def test_of_gates_a_whole_graph_is_refused() -> None:
    optimizer = COMPOSED["accumulate"]()
    compiled = torch.compile(optimizer.update, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="gates_are_not_traced"):
        stepped(compiled, optimizer)


def test_what_a_population_cannot_share_is_named() -> None:
    """A gradient can be finite for one member of the population and not for another."""
    optimizer, params = COMPOSED["finite"](), params_of()

    def step(scale: Tensor) -> Any:
        grads = {name: scale * one for name, one in params.items()}
        return optimizer.update(params, grads, optimizer.init(params))[0]

    with pytest.raises(RuntimeError) as found:
        torch.func.vmap(step)(torch.ones(3))
    assert "apply_if_finite looks at numbers that torch.func hides" in found.value.__notes__[0]
