"""Ways to begin with an optimizer and to step parameters in place, compiled or not."""

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from functional_optim import Optimizer, TorchOptimizer, export_step, if_any, sgd

NAMESPACE = "functional_optim.tests.core"


@optree.dataclasses.dataclass(namespace=NAMESPACE)
class Layer:
    """Node with two tensors, and a field that belongs to the structure."""

    weight: Tensor
    bias: Tensor
    name: str = optree.dataclasses.field(pytree_node=False, default="layer")


Way = Callable[[Optimizer, Any], Any]

WAYS_TO_BEGIN: dict[str, Way] = {
    "init": lambda optimizer, params: optimizer.init(params),
    "bind": lambda optimizer, params: optimizer.bind(params),
    "bind, with a state": lambda optimizer, params: optimizer.bind(params, sgd().init(params)),
    "script": lambda optimizer, params: optimizer.script(params),
    "script, with a state": lambda optimizer, params: optimizer.script(params, sgd().init(params)),
    "export": export_step,
}
COMPILING = ("script", "script, with a state", "export")
"""Ways that compile the optimizer."""


def body_and_head() -> Any:
    return {
        "body": {"weight": torch.ones(2), "bias": torch.ones(1)},
        "head": [torch.ones(3), None],
    }


def is_scale(path: Any) -> bool:
    return bool(path[-1] == "scale")


MEANT_FOR_SOME = sgd(0.1).override(if_any(is_scale), lr=0.2).override(("head",), lr=0.3)


W, SHARED = torch.ones(2), torch.ones(3)
BAD_TREES: dict[str, tuple[Any, type[Exception], str]] = {
    "empty dict": ({}, ValueError, "no tensor"),
    "only None": ({"a": None, "b": [None]}, ValueError, "no tensor"),
    "None alone": (None, ValueError, "no tensor"),
    "number": ({"a": {"x": 1.5}}, TypeError, "'a.x' must be a tensor or None, got float"),
    "string": (["ab"], TypeError, "'0' must be a tensor or None, got str"),
    "integer": ({"a": {"i": torch.arange(3)}}, ValueError, "'a.i' has dtype torch.int64"),
    "bool": ([torch.ones(2), torch.ones(2).bool()], ValueError, "'1' has dtype torch.bool"),
    "sparse": ({"s": torch.eye(2).to_sparse()}, ValueError, "'s' has layout torch.sparse_coo"),
    "twice": ({"a": SHARED, "b": [W, SHARED]}, ValueError, "'b.1' is also at 'a'"),
    "lone integer": (torch.arange(3), ValueError, "'<root>' has dtype torch.int64"),
    "module": (torch.nn.Linear(2, 2), TypeError, "'<root>' must be a tensor or None, got Linear"),
    "generator": ((p for p in [W]), TypeError, "'<root>' must be a tensor or None, got generator"),
}
"""Invalid trees of parameters: (tree, error, text)."""


def grads_of(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.ones_like(param) for name, param in params.items()}


WAYS_IN_PLACE: dict[str, Way] = {
    "update_": lambda one, params: one.update_(params, grads_of(params), one.init(params)),
    "bind": lambda one, params: one.bind(params).step(grads_of(params)),
    "TorchOptimizer": lambda one, params: TorchOptimizer(params.values(), one),
    "a group": lambda one, params: TorchOptimizer([torch.ones(2)], one).add_param_group(
        {"params": [*params.values()]}
    ),
    "script": lambda one, params: one.script(params).step(list(grads_of(params).values())),
    "export": export_step,
}


def computed() -> dict[str, Tensor]:
    """Return a leaf, and a tensor that autograd computed."""
    return {"a": torch.ones(3, requires_grad=True), "z": torch.ones(3, requires_grad=True) * 2.0}


def of_a_view() -> dict[str, Tensor]:
    """Return a leaf, and a writable view of another leaf."""
    return {"a": torch.ones(3), "z": torch.ones(4, requires_grad=True)[1:]}
