"""Steps that a rule or a transform refuses change no leaf."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    Rule,
    TorchOptimizer,
    accumulate,
    adam,
    chain,
    clip_by_global_norm,
    schedule_free_adamw,
    sgd,
)
from functional_optim.core.stage import NoState
from tests.choices import each_value
from tests.composition.trees import two_parts

from .support import assert_same


class Rate(NamedTuple):
    lr: float


def _drifting(
    param: Tensor, grad: Tensor, state: NoState, c: Rate
) -> tuple[Tensor, NoState]:  # returns float32, also for a 16-bit parameter
    return param.float() - c.lr * grad.float(), state


def _for_vectors(param: Tensor, grad: Tensor, state: NoState, c: Rate) -> tuple[Tensor, NoState]:
    if param.dim() == 2:
        raise NotImplementedError("matrices are none of mine")
    return param - c.lr * grad, state


RULES: dict[str, Optimizer] = {
    "drifts": chain(Rule(name="drifts", hyper=Rate, rule=_drifting)(lr=0.5)),
    "drifts, of matrices": chain(
        Rule(name="drifts", hyper=Rate, rule=_drifting, kind="per_matrix")(lr=0.5)
    ),
    "raises": chain(Rule(name="raises", hyper=Rate, rule=_for_vectors, kind="per_matrix")(lr=0.5)),
    "raises behind a total": chain(
        clip_by_global_norm(1.0),
        Rule(name="raises", hyper=Rate, rule=_for_vectors, kind="per_matrix")(lr=0.5),
    ),
}

Door = Callable[[Optimizer, dict[str, Tensor], Any, dict[str, Tensor]], object]


def _by_torch(
    optimizer: Optimizer, params: dict[str, Tensor], state: Any, grads: dict[str, Tensor]
) -> None:
    for name, param in params.items():
        param.requires_grad_().grad = grads[name]
    TorchOptimizer(list(params.items()), optimizer).step()


DOORS: dict[str, Door] = {
    "update_": lambda one, params, state, grads: one.update_(params, grads, state),
    "bind": lambda one, params, state, grads: one.bind(params, state).step(grads),
    "TorchOptimizer": _by_torch,
}


@each_value(refusing=RULES, door=DOORS, executor=["reference", "auto", "blocked"])
def test_a_rule_refuses_before_any_leaf_is_written(
    refusing: Optimizer, door: Door, executor: Any
) -> None:
    """The rule accepts the first leaf and refuses the second one."""
    optimizer = refusing.using(executor=executor)
    params = {"vector": torch.ones(3), "matrix": torch.ones(2, 2, dtype=torch.bfloat16)}
    grads = {key: torch.ones_like(one) for key, one in params.items()}
    state = optimizer.init(params)
    with pytest.raises((RuntimeError, NotImplementedError), match="'matrix'|none of mine"):
        door(optimizer, params, state, grads)
    for one in params.values():
        assert torch.equal(one, torch.ones_like(one))
    assert_same(state, optimizer.init(params))


IN_VMAP: dict[str, Callable[[], Optimizer]] = {
    "adam": lambda: adam(0.1),
    "accumulate": lambda: chain(accumulate(1), adam(0.1)),
    "clipped": lambda: chain(clip_by_global_norm(1.0), sgd(0.1, momentum=0.9)),
    "schedule-free": schedule_free_adamw,
    "parts": two_parts,
}


@pytest.mark.parametrize("name", IN_VMAP)
def test_vmap_over_gradients_alone_is_refused(name: str) -> None:
    """The first leaf has one gradient for all examples; the last leaf has one for each."""
    optimizer = IN_VMAP[name]()
    params = {"bias": torch.ones(3), "weight": torch.ones(2, 3)}
    state, before = optimizer.init(params), optimizer.init(params)

    def step(grad: Tensor) -> Tensor:
        grads = {"bias": torch.ones(3), "weight": grad.expand(2, 3)}
        optimizer.update_(params, grads, state)
        return params["weight"].sum()

    with pytest.raises(ValueError, match="'(weight|bias)' has a result for each .*vmap.*update"):
        torch.vmap(step)(torch.ones(4, 3))
    for one in params.values():
        assert torch.equal(one, torch.ones_like(one))
    assert_same(state, before)
