"""Any pytree of parameters, which keeps its structure, its types, and its order."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor, nn

from functional_optim import LeafState, State, adam, leaf_paths, sgd
from tests.choices import each_value

from .support import assert_same, noise, step
from .ways import NAMESPACE, Layer


class Affine(NamedTuple):
    weight: Tensor
    bias: Tensor | None


@dataclass
class Plain:
    """Class that optree does not know, and so takes for a leaf."""

    weight: Tensor


def _one(seed: int) -> Tensor:
    return noise(seed, 2, 3, dtype=torch.float32)


def _module(seed: int) -> dict[str, Tensor]:
    module = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2), nn.PReLU()))
    with torch.no_grad():
        for index, param in enumerate(module.parameters()):
            param.copy_(noise(seed + index, *param.shape))
    return dict(module.named_parameters())


TREES: dict[str, Callable[[int], Any]] = {
    "lone tensor": _one,
    "dict": lambda s: {"z": _one(s), "a": _one(s + 1), "m": _one(s + 2)},
    "list": lambda s: [_one(s), _one(s + 1)],
    "tuple": lambda s: (_one(s), _one(s + 1)),
    "NamedTuple": lambda s: Affine(_one(s), _one(s + 1)),
    "OrderedDict": lambda s: OrderedDict(z=_one(s), a=_one(s + 1)),
    "defaultdict": lambda s: defaultdict(list, z=_one(s), a=_one(s + 1)),
    "deque": lambda s: deque([_one(s), _one(s + 1)], maxlen=5),
    "nested": lambda s: {"a": [_one(s), (_one(s + 1), Affine(_one(s + 2), None))], "b": {}},
    "empty subtrees": lambda s: {"none": None, "list": [], "dict": {}, "tuple": (), "w": _one(s)},
    "int and str keys": lambda s: {3: _one(s), "a": _one(s + 1), 1: _one(s + 2)},
    "module": _module,
}


@each_value(make=TREES)
def test_a_tree_keeps_its_structure_and_is_stepped_leaf_by_leaf(make: Callable[[int], Any]) -> None:
    optimizer, params, grads = adam(0.1), make(0), make(50)
    new, new_state = optimizer.update(params, grads, optimizer.init(params))
    assert type(new) is type(params)
    assert type(new_state) is State
    if isinstance(params, dict):
        assert list(new) == list(new_state.leaves) == list(params)
    structures = [optree.tree_structure(one, none_is_leaf=True) for one in (new, params)]
    assert structures[0] == structures[1]
    leaves = zip(optree.tree_leaves(params), optree.tree_leaves(grads), strict=True)
    alone = [optimizer.update(param, grad, optimizer.init(param)) for param, grad in leaves]
    stepped = optree.tree_leaves(new_state.leaves, is_leaf=lambda node: type(node) is LeafState)
    assert_same(optree.tree_leaves(new), [param for param, _ in alone])
    assert_same(stepped, [one.leaves for _, one in alone])


def test_container_details_are_kept() -> None:
    default, queue = TREES["defaultdict"](0), TREES["deque"](0)
    assert step(sgd(), default, default).default_factory is list
    assert step(sgd(), queue, queue).maxlen == 5


def test_kinds_of_dict_may_stand_for_one_another_in_any_order() -> None:
    params = {"z": _one(0), "a": _one(1)}
    new = step(sgd(1.0), params, OrderedDict(a=_one(3), z=_one(2)))
    assert type(new) is dict
    assert_same(new, {"z": params["z"] - _one(2), "a": params["a"] - _one(3)})


def test_a_registered_dataclass_needs_its_namespace() -> None:
    """A field that is no tensor is part of the structure."""
    params, grads = {"l": Layer(_one(0), _one(1), "first")}, {"l": Layer(_one(2), _one(3), "first")}
    with pytest.raises(TypeError, match="'l' must be a tensor or None, got Layer"):
        adam().init(params)
    optimizer = adam(0.1).using(namespace=NAMESPACE)
    state = optimizer.init(params)
    new, new_state = optimizer.update(params, grads, state)
    optimizer.update_(params, grads, state)
    for own, kept in ((new, new_state), (params, state)):
        assert (type(own["l"]), own["l"].name) == (Layer, "first")
        assert type(kept.leaves["l"]) is Layer
        assert type(kept.leaves["l"].weight) is LeafState
        assert_same(own["l"].weight, step(adam(0.1), _one(0), _one(2)))
        assert_same(own["l"].bias, step(adam(0.1), _one(1), _one(3)))
    assert leaf_paths(params, NAMESPACE) == [("l", "weight"), ("l", "bias")]
    with pytest.raises(ValueError, match="tree of gradients"):
        optimizer.update(params, {"l": Layer(_one(2), _one(3), "second")}, state)
    with pytest.raises(TypeError, match="'l' must be a tensor or None, got Layer"):
        adam(0.1).update_(params, grads, state)


def test_an_unknown_class_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="'0' must be a tensor or None, got Plain"):
        sgd().init([Plain(_one(0))])


def test_using_leaves_the_rest_alone() -> None:
    optimizer = adam(0.3).override(("a",), lr=0.1).using(namespace="x")
    assert (optimizer.namespace, optimizer.executor) == ("x", "auto")
    both = optimizer.using(executor="blocked")
    assert (both.namespace, both.executor) == ("x", "blocked")
    assert (both.links, both.overrides) == (optimizer.links, optimizer.overrides)
    with pytest.raises(ValueError, match=r"executor must be one of .*, got 'fast'"):
        optimizer.using(executor="fast")
    with pytest.raises(ValueError, match=r"got 'script'; .* optimizer.script\(params\)"):
        optimizer.using(executor="script")


def test_leaf_paths_are_the_order_of_the_leaves() -> None:
    params = {"b": [_one(0), None], "a": (_one(1), {"x": _one(2)})}
    assert leaf_paths(params) == [("a", 0), ("a", 1, "x"), ("b", 0), ("b", 1)]
    assert leaf_paths(_one(0)) == [()]
