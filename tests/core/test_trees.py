"""Any pytree of parameters: the same structure, the same types, the same order come back."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor, nn

from functional_optim import LeafState, State, adam, leaf_paths, sgd

from .support import assert_same, noise

NAMESPACE = "functional_optim.tests.core"


class Affine(NamedTuple):
    weight: Tensor
    bias: Tensor | None


@optree.dataclasses.dataclass(namespace=NAMESPACE)
class Layer:
    """A node with two tensors and a field that belongs to the structure."""

    weight: Tensor
    bias: Tensor
    name: str = optree.dataclasses.field(pytree_node=False, default="layer")


@dataclass
class Plain:
    """A class that optree does not know: a leaf, and no tensor."""

    weight: Tensor


def _one(seed: int) -> Tensor:
    return noise(seed, 2, 3, dtype=torch.float32)


TREES: dict[str, Callable[[int], Any]] = {
    "lone tensor": _one,
    "dict": lambda s: {"z": _one(s), "a": _one(s + 1)},
    "list": lambda s: [_one(s), _one(s + 1)],
    "tuple": lambda s: (_one(s), _one(s + 1)),
    "NamedTuple": lambda s: Affine(_one(s), _one(s + 1)),
    "OrderedDict": lambda s: OrderedDict(z=_one(s), a=_one(s + 1)),
    "defaultdict": lambda s: defaultdict(list, z=_one(s), a=_one(s + 1)),
    "deque": lambda s: deque([_one(s), _one(s + 1)], maxlen=5),
    "nested": lambda s: {"a": [_one(s), (_one(s + 1), Affine(_one(s + 2), None))], "b": {}},
    "empty subtrees": lambda s: {"none": None, "list": [], "dict": {}, "tuple": (), "w": _one(s)},
    "int and str keys": lambda s: {3: _one(s), "a": _one(s + 1), 1: _one(s + 2)},
    "module": lambda s: dict(_module(s).named_parameters()),
}


def _module(seed: int) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2), nn.PReLU()))
    with torch.no_grad():
        for index, param in enumerate(module.parameters()):
            param.copy_(noise(seed + index, *param.shape))
    return module


@pytest.mark.parametrize("name", TREES)
def test_a_tree_keeps_its_structure_and_is_stepped_leaf_by_leaf(name: str) -> None:
    params, grads, optimizer = TREES[name](0), TREES[name](50), adam(0.1)
    state = optimizer.init(params)
    new, new_state = optimizer.update(params, grads, state)

    assert type(new) is type(params)
    assert type(new_state) is State
    assert optree.tree_structure(new, none_is_leaf=True) == optree.tree_structure(
        params, none_is_leaf=True
    )
    stepped = optree.tree_leaves(new_state.leaves, is_leaf=lambda node: isinstance(node, LeafState))
    alone = [
        optimizer.update(param, grad, optimizer.init(param))
        for param, grad in zip(optree.tree_leaves(params), optree.tree_leaves(grads), strict=True)
    ]
    assert_same(optree.tree_leaves(new), [param for param, _ in alone])
    assert_same(stepped, [one.leaves for _, one in alone])


def test_the_order_of_a_dict_is_kept() -> None:
    params = {"z": _one(0), "a": _one(1), "m": _one(2)}
    grads = {"m": _one(3), "z": _one(4), "a": _one(5)}
    new, state = sgd().update(params, grads, sgd().init(params))
    assert list(new) == list(state.leaves) == ["z", "a", "m"]
    assert_same(new["z"], params["z"] - 1e-3 * grads["z"])


def test_container_details_are_kept() -> None:
    default = TREES["defaultdict"](0)
    new, _ = sgd().update(default, TREES["defaultdict"](1), sgd().init(default))
    assert new.default_factory is list
    queue = TREES["deque"](0)
    stepped, _ = sgd().update(queue, TREES["deque"](1), sgd().init(queue))
    assert stepped.maxlen == 5


def test_kinds_of_dict_may_stand_for_one_another() -> None:
    params = {"z": _one(0), "a": _one(1)}
    grads = OrderedDict(a=_one(3), z=_one(2))
    new, _ = sgd(lr=1.0).update(params, grads, sgd().init(params))
    assert type(new) is dict
    assert_same(new, {"z": params["z"] - grads["z"], "a": params["a"] - grads["a"]})


def test_a_registered_dataclass_needs_its_namespace() -> None:
    params = {"l": Layer(_one(0), _one(1), name="first")}
    grads = {"l": Layer(_one(2), _one(3), name="first")}
    with pytest.raises(TypeError, match="'l' must be a tensor or None, got Layer"):
        adam().init(params)

    optimizer = adam(0.1).using(namespace=NAMESPACE)
    state = optimizer.init(params)
    new, state = optimizer.update(params, grads, state)
    assert type(new["l"]) is Layer
    assert new["l"].name == "first"
    assert type(state.leaves["l"]) is Layer
    assert type(state.leaves["l"].weight) is LeafState
    expected, _ = adam(0.1).update(_one(0), _one(2), adam().init(_one(0)))
    assert_same(new["l"].weight, expected)
    assert leaf_paths(params, NAMESPACE) == [("l", "weight"), ("l", "bias")]


def test_static_fields_of_a_dataclass_are_part_of_the_tree() -> None:
    optimizer = adam().using(namespace=NAMESPACE)
    params = {"l": Layer(_one(0), _one(1), name="first")}
    with pytest.raises(ValueError, match="tree of gradients"):
        optimizer.update(
            params, {"l": Layer(_one(2), _one(3), name="second")}, optimizer.init(params)
        )


def test_an_unknown_class_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="'0' must be a tensor or None, got Plain"):
        sgd().init([Plain(_one(0))])


@pytest.mark.parametrize("method", ["update", "update_", "script"])
def test_a_namespace_reaches_every_method(method: str) -> None:
    optimizer = adam(0.1).using(namespace=NAMESPACE)
    params, grads = Layer(_one(0), _one(1)), Layer(_one(2), _one(3))
    expected, _ = adam(0.1).update(_one(1), _one(3), adam().init(_one(1)))
    state = optimizer.init(params)
    if method == "update":
        params, _ = optimizer.update(params, grads, state)
    elif method == "update_":
        optimizer.update_(params, grads, state)
    else:
        optimizer.script(params).step([grads.weight, grads.bias])
    assert_same(params.bias, expected)


def test_using_leaves_the_rest_alone() -> None:
    optimizer = adam(0.3).override(("a",), lr=0.1).using(namespace="x")
    assert optimizer.namespace == "x"
    assert optimizer.executor == "reference"
    both = optimizer.using(executor="script")
    assert (both.namespace, both.executor) == ("x", "script")
    assert both.links == optimizer.links
    assert both.overrides == optimizer.overrides
    with pytest.raises(ValueError, match=r"executor must be one of .*, got 'fast'"):
        optimizer.using(executor="fast")


def test_leaf_paths_are_the_order_of_the_leaves() -> None:
    params = {"b": [_one(0), None], "a": (_one(1), {"x": _one(2)})}
    assert leaf_paths(params) == [("a", 0), ("a", 1, "x"), ("b", 0), ("b", 1)]
    assert leaf_paths(_one(0)) == [()]


def test_no_leaf_has_a_gradient() -> None:
    params = {"a": _one(0), "b": None}
    state = adam().init(params)
    new, new_state = adam().update(params, {"a": None, "b": None}, state)
    assert new["a"] is params["a"]
    assert new_state.leaves["a"] is state.leaves["a"]
    assert new_state.leaves["b"] is None
