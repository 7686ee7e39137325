"""Random optimizers and gradients: in-place steps and TorchOptimizer match pure steps."""

from collections.abc import Callable
from typing import Any

import optree
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    accumulate,
    adagrad,
    adam,
    adamw,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    clip_by_value,
    ema,
    lion,
    lookahead,
    masked,
    partition,
    prodigy,
    rmsprop,
    schedule_free_adamw,
    sgd,
    weight_decay,
    with_shape,
)

from ..choices import case, examples
from ..tensors import assert_same, normal
from .trees import lrs_at

SHAPES = {"x": (5,), "y": (3, 4), "z": (), "w": (2, 2), "n": (7,)}
RULES: list[Callable[[], Optimizer]] = [
    lambda: sgd(0.1),
    lambda: sgd(0.1, momentum=0.9, nesterov=True),
    lambda: adamw(0.01),
    lambda: adam(0.01, amsgrad=True),
    lambda: rmsprop(0.01),
    lambda: adagrad(0.1),
    lambda: lion(0.01),
    lambda: schedule_free_adamw(0.01),
    prodigy,
]
BEFORE: list[Callable[[], Any]] = [
    lambda: accumulate(2),
    lambda: accumulate(3),
    lambda: apply_if_finite(20),
    lambda: clip_by_global_norm(0.5),
    lambda: clip_by_value(0.3),
    lambda: weight_decay(0.1),
    lambda: masked(weight_decay(0.2), with_shape(lambda shape: len(shape) == 2)),
]
LABELS: list[Callable[[Any, Any], str]] = [
    lambda path, shape: "a" if len(shape) == 2 else "b",
    lambda path, shape: "a" if path[0] in {"x", "w"} else "b",
    lambda path, shape: "a" if shape == () else "b",
]


def put_together(parts: tuple[list[Any], Any, list[Any]]) -> Optimizer:
    before, inner, after = parts
    kept = [one for k, one in enumerate(before) if one not in before[:k]]
    return chain(*(one() for one in kept), inner, *(one() for one in after))


def parted(inner: Any) -> Any:
    both = st.tuples(st.sampled_from(LABELS), inner, inner)
    return both.map(lambda drawn: partition({"a": drawn[1], "b": drawn[2]}, drawn[0]))


def chained(inner: Any) -> Any:
    last = st.lists(st.sampled_from([lambda: ema(0.9), lambda: lookahead(2)]), max_size=1)
    before = st.lists(st.sampled_from(BEFORE), max_size=2)
    return st.tuples(before, inner, last).map(put_together)


LEAVES = st.sampled_from(RULES).map(lambda make: make())
OPTIMIZERS = st.recursive(LEAVES, lambda one: parted(one) | chained(one), max_leaves=4)
HISTORIES = st.lists(
    st.tuples(
        st.sets(st.sampled_from(sorted(SHAPES)), max_size=2),  # leaves without a gradient
        st.sampled_from(["", "", "", *SHAPES]),  # leaf whose gradient is infinite
        st.booleans(),  # True if the step changes learning rates
    ),
    min_size=4,
    max_size=14,
)


def same_nan(tree: Any) -> Any:
    """Return a tree with one bit pattern for NaN, since operations may return any NaN."""

    def one(x: Tensor) -> Tensor:
        return torch.where(x.isnan(), torch.nan, x) if x.is_floating_point() else x

    return optree.tree_map(one, tree)


@examples(15)
@given(OPTIMIZERS, HISTORIES, st.sampled_from(["reference", "blocked", "auto"]))
def test_all_ways_of_stepping_are_the_pure_one(
    optimizer: Optimizer, history: list[Any], executor: str
) -> None:
    chosen = optimizer.using(executor=executor)
    want: Any = {name: normal(*shape, seed=k) for k, (name, shape) in enumerate(SHAPES.items())}
    params = optree.tree_map(torch.clone, want)
    twins = {name: one.clone().requires_grad_() for name, one in want.items()}
    state, own = optimizer.init(want), chosen.init(params)
    by_torch = TorchOptimizer(twins.items(), chosen)
    are_same = True  # False after a step with its own learning rates, which groups lack
    for step, (missing, bad, changes) in enumerate(history):
        grads: dict[str, Any] = {
            name: None if name in missing else normal(*shape, seed=10 * step + k + 100)
            for k, (name, shape) in enumerate(SHAPES.items())
        }
        if bad and grads[bad] is not None:
            grads[bad] = grads[bad] * torch.inf
        lrs = lrs_at(optimizer, step) if changes else {}
        want, state = optimizer.using(executor="reference").update(want, grads, state, **lrs)
        chosen.update_(params, grads, own, **lrs)
        with case(step=step):
            assert_same(same_nan([params, own]), same_nan([want, state]))
        are_same = are_same and not lrs
        if are_same:
            for name, grad in grads.items():
                twins[name].grad = grad
            by_torch.step()
            with case(step=step):
                made = {name: one.detach() for name, one in twins.items()}
                assert_same(same_nan(made), same_nan(want))
