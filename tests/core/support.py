"""Support for the core's tests: bit-for-bit comparison, frozen inputs, tables of optimizers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    adadelta,
    adafactor,
    adagrad,
    adam,
    adamax,
    adamw,
    algorithms,
    asgd,
    chain,
    clip_by_global_norm,
    clip_by_value,
    decoupled_weight_decay,
    ftrl,
    lamb,
    lars,
    lion,
    nadam,
    prodigy,
    qhm,
    radam,
    rmsprop,
    rowwise_adagrad,
    rprop,
    schedule_free_adamw,
    schedule_free_sgd,
    sgd,
    sparse_adam,
    weight_decay,
)
from functional_optim.kernels import ExecutorName
from tests.cases import CASES, INPUT_CASES

from ..choices import case
from ..tensors import bits, same_bits  # noqa: F401  for the tests
from . import adaptive, layerwise

REAL = ("adafactor", "sparse_adam")
"""Algorithms that take no complex parameters, as in torch."""


def assert_same(a: Any, b: Any, namespace: str = "") -> None:
    """Assert that two trees have the same structure and the same bits."""
    paths, left, spec = optree.tree_flatten_with_path(a, none_is_leaf=True, namespace=namespace)
    right, other = optree.tree_flatten(b, none_is_leaf=True, namespace=namespace)
    assert spec == other
    for path, one, two in zip(paths, left, right, strict=True):
        if one is None or two is None:
            assert one is two, path
        else:
            assert same_bits(one, two), f"{path}: {one} is not {two}"


def assert_differ(a: Any, b: Any) -> None:
    """Assert that two trees differ, as a guard against a comparison that cannot fail."""
    pairs = zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True)
    assert not all(same_bits(one, two) for one, two in pairs)


def tensors(*trees: Any, namespace: str = "") -> list[Tensor]:
    """Return every tensor in some trees."""
    leaves = optree.tree_leaves(trees, namespace=namespace)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class Frozen:
    """Copies of the tensors in some trees, to check later that nothing has changed them."""

    def __init__(self, *trees: Any, namespace: str = "") -> None:
        self._tensors = tensors(*trees, namespace=namespace)
        self._copies = [_copy(tensor) for tensor in self._tensors]
        self._versions = [tensor._version for tensor in self._tensors]

    def assert_untouched(self) -> None:
        """Assert that no bit and no version counter has changed."""
        for tensor, copy, version in zip(self._tensors, self._copies, self._versions, strict=True):
            assert tensor._version == version
            if copy is not None:
                assert same_bits(tensor, copy)


def _copy(tensor: Tensor) -> Tensor | None:
    """Return a copy to compare with, or None for a meta tensor or a layout that is not strided."""
    readable = tensor.device.type != "meta" and tensor.layout == torch.strided
    return tensor.detach().clone() if readable else None


def like(tensor: Tensor, values: Tensor) -> Tensor:
    """Return a copy of ``values`` with the strides and the dtype of ``tensor``."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return made.copy_(values.detach())


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return normal numbers, the same in every real dtype (up to rounding)."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.complex128).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def tree(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return a small tree: a matrix, a vector, a 0-d leaf and an empty leaf."""
    shapes: dict[str, tuple[int, ...]] = {"w": (3, 4), "b": (5,), "s": (), "e": (0, 2)}
    return {
        key: noise(seed * 10 + i, *shape, dtype=dtype)
        for i, (key, shape) in enumerate(shapes.items())
    }


def steps(
    optimizer: Optimizer, params: Any, grads: Callable[[int], Any], count: int = 4
) -> tuple[Any, Any]:
    """Return params and state after ``count`` pure steps from a fresh state."""
    state = optimizer.init(params)
    for index in range(count):
        params, state = optimizer.update(params, grads(index), state)
    return params, state


VARIANTS: dict[str, Optimizer] = {
    "adadelta": adadelta(weight_decay=0.1),
    "adafactor": adafactor(0.1, weight_decay=0.1),
    "adafactor bounded": adafactor(0.1, eps=(0.1, 0.5), d=1.5, maximize=True),
    "adagrad": adagrad(0.1, lr_decay=0.2, weight_decay=0.1, initial_accumulator_value=0.3),
    "adam": adam(0.1),
    "adam amsgrad": adam(0.1, (0.5, 0.6), 1e-4, 0.1, True, maximize=True),
    "adamax": adamax(0.1, weight_decay=0.1),
    "adamw": adamw(0.1, weight_decay=0.2, amsgrad=True),
    "asgd": asgd(0.1, lambd=0.3, t0=1, weight_decay=0.1),
    "ftrl": ftrl(0.1, l1=0.1, l2=0.2),
    "lamb": lamb(0.1, weight_decay=0.2, max_ratio=3.0, maximize=True),
    "lamb from below": lamb(0.1, min_norm=5.0),
    "lars": lars(0.1, momentum=0.9, weight_decay=0.2, trust_coefficient=0.5),
    "lars nesterov": lars(0.1, momentum=0.9, nesterov=True, trust_coefficient=0.5),
    "lion": lion(0.1, weight_decay=0.2),
    "nadam": nadam(0.1, momentum_decay=0.3, weight_decay=0.1),
    "qhm": qhm(0.1, 0.9, 0.7, 0.1),
    "qhm direct": qhm(0.1, 0.9, 0.3, 0.1, weight_decay_type="direct", maximize=True),
    "radam": radam(0.1, (0.5, 0.9), weight_decay=0.1, decoupled_weight_decay=True),
    "rmsprop": rmsprop(0.1),
    "rmsprop centered": rmsprop(0.1, weight_decay=0.1, momentum=0.9, centered=True),
    "rowwise_adagrad": rowwise_adagrad(0.1, weight_decay=0.1),
    "rprop": rprop(0.1),
    "sgd": sgd(0.1, weight_decay=0.1, maximize=True),
    "sgd momentum": sgd(0.1, momentum=0.9, dampening=0.3),
    "sgd nesterov": sgd(0.1, momentum=0.9, nesterov=True),
    "sparse_adam": sparse_adam(0.1, takes_dense=True),
    **layerwise.VARIANTS,
    **adaptive.VARIANTS,
}
"""Every algorithm, with options that change its state or its path, and with visible steps."""

MATRICES = {name for name, one in CASES.items() if one.matrices}
"""Algorithms that step matrices only; see ``test_matrices``."""

COMPOSED: dict[str, Optimizer] = {
    "prodigy": prodigy(d0=1e-3, eps=0.1, use_bias_correction=True, d_coef=100, growth_rate=2.5),
    "prodigy decays": prodigy(0.5, d0=0.1, weight_decay=0.1, decouple=False),
    "schedule_free_adamw": schedule_free_adamw(0.1, weight_decay=0.1, warmup_steps=2),
    "schedule_free_sgd": schedule_free_sgd(0.1, 0.7, 0.1, 2, r=1.0),
    **layerwise.COMPOSED,
}
"""Algorithms that keep shared scalars."""

GIVEN = {*algorithms.__all__} & {*INPUT_CASES}
"""Algorithms with inputs beside gradients; see ``tests/composition/test_inputs.py``."""

NAMED = {name.split()[0] for name in (*VARIANTS, *COMPOSED)}
assert set(algorithms.__all__) - MATRICES - GIVEN == NAMED

CHAINS: dict[str, Optimizer] = {
    "clipped": chain(clip_by_global_norm(1.0), adamw(0.1)),
    "clipped behind a decay": chain(
        decoupled_weight_decay(0.3), weight_decay(0.2), clip_by_global_norm(0.5), adam(0.1)
    ),
    "clipped twice": chain(
        clip_by_global_norm(1.5), clip_by_value(0.6), clip_by_global_norm(0.7), rmsprop(0.1)
    ),
    "rule before a measure": chain(
        sgd(0.05, momentum=0.9).links[-1], clip_by_global_norm(0.5), lion(0.1)
    ),
}
"""Chains whose leaves depend on one another, with the measured stage at every position."""

EVERY = {**VARIANTS, **COMPOSED, **CHAINS}

IN_PYTHON: tuple[ExecutorName, ...] = ("reference", "blocked")
"""Executors that compile nothing."""


@contextmanager
def refused(error: type[Exception], message: str, **named: Any) -> Iterator[None]:
    """Assert that the named case raises this error with this message."""
    with case(**named), pytest.raises(error, match=message):
        yield


def step(optimizer: Optimizer, params: Any, grads: Any, **hyper: Any) -> Any:
    """Return the parameters after the first step."""
    return optimizer.update(params, grads, optimizer.init(params), **hyper)[0]
