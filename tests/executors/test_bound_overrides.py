"""An override that is meant for no parameter is a mistake, and is said before anything moves."""

import pickle
from typing import Any

import pytest
import torch

from functional_optim import Optimizer, leaf_paths, sgd
from functional_optim.overrides import check_used, if_any, part_of

from .support import assert_same


def tree() -> Any:
    return {
        "body": {"weight": torch.ones(2), "bias": torch.ones(1)},
        "head": [torch.ones(3), None],
    }


def is_scale(path: Any) -> bool:
    return bool(path[-1] == "scale")


def test_it_names_the_pattern_and_what_there_is() -> None:
    params = tree()
    places = [params["body"]["weight"].data_ptr(), params["head"][0].data_ptr()]
    for where, shown in (
        (("heda",), r"override\(\('heda',\), lr=0.2\)"),
        (("head", 7), r"override\(\('head', 7\), lr=0.2\)"),
        (is_scale, r"override\(is_scale at .*test_bound_overrides.py:\d+, lr=0.2\)"),
    ):
        optimizer = sgd(0.1).override(where, lr=0.2)
        with pytest.raises(ValueError, match=shown) as caught:
            optimizer.bind(params)
        assert "there are 'body.bias', 'body.weight', 'head.0', 'head.1'" in str(caught.value)
    assert [params["body"]["weight"].data_ptr(), params["head"][0].data_ptr()] == places


def test_of_many_paths_some_are_named() -> None:
    paths = [(index,) for index in range(50)]
    overrides = sgd().override(("x",), lr=0.2).overrides
    with pytest.raises(ValueError, match=r"there are '0', .*'7' and 42 more: correct it"):
        check_used(overrides, paths)
    with pytest.raises(ValueError, match="there are none"):
        check_used(overrides, [])


@pytest.mark.parametrize("where", [(), ("head",), ("head", 1), lambda path: path[-1] == "bias"])
def test_what_is_meant_for_some_is_right(where: Any) -> None:
    """A leaf that is None is one, too: it may be a parameter of tomorrow."""
    optimizer = sgd(0.1).override(where, lr=0.2)
    bound = optimizer.bind(tree())
    bound.step(tree())
    params = tree()
    optimizer.update_(params, tree(), optimizer.init(params))
    assert_same(bound.params, params)


def test_there_may_be_none_where_that_is_said() -> None:
    optimizer = sgd(0.1).override(if_any(is_scale), lr=0.2).override(if_any(("head",)), lr=0.3)
    bound = optimizer.bind(tree())
    assert bound.optimizer.hypers_at(("head", 0))[-1].lr == 0.3
    assert bound.optimizer.hypers_at(("body", "scale"))[-1].lr == 0.2
    assert bound.optimizer.hypers_at(("body", "bias"))[-1].lr == 0.1
    assert if_any(if_any(is_scale)) == if_any(is_scale)
    assert pickle.loads(pickle.dumps(optimizer)) == optimizer


def halves(optimizer: Optimizer) -> Any:
    """The tree as two ranks would step it, each its part."""
    made = {}
    for name, part in tree().items():
        bound = part_of(optimizer, leaf_paths(tree())).bind({name: part})
        bound.step({name: tree()[name]})
        made[name] = bound.params[name]
    return made


def test_parts_of_a_tree_are_checked_against_the_whole() -> None:
    optimizer = sgd(0.1).override(("head",), lr=0.2).override(("body", "bias"), weight_decay=0.5)
    whole = optimizer.bind(tree())
    whole.step(tree())
    assert_same(halves(optimizer), whole.params)
    with pytest.raises(ValueError, match="is meant for no parameter"):
        halves(optimizer.override(("tail",), lr=0.3))
    with pytest.raises(ValueError, match="part_of"):
        optimizer.bind({"body": tree()["body"]})
