"""An override that is meant for no parameter is a mistake, and is said before anything is made."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from functional_optim import Optimizer, export_step, if_any, sgd
from functional_optim.overrides import check_used
from functional_optim.pointwise import require_pointwise

from .support import assert_same


def tree() -> Any:
    return {
        "body": {"weight": torch.ones(2), "bias": torch.ones(1)},
        "head": [torch.ones(3), None],
    }


def is_scale(path: Any) -> bool:
    return bool(path[-1] == "scale")


WAYS: dict[str, Callable[[Optimizer, Any], Any]] = {
    "init": lambda optimizer, params: optimizer.init(params),
    "bind": lambda optimizer, params: optimizer.bind(params),
    "bind, with a state": lambda optimizer, params: optimizer.bind(params, sgd().init(params)),
    "script": lambda optimizer, params: optimizer.script(params),
    "script, with a state": lambda optimizer, params: optimizer.script(params, sgd().init(params)),
    "export": export_step,
}


@pytest.mark.parametrize("way", WAYS)
def test_it_names_the_pattern_and_what_there_is(way: str) -> None:
    params = tree()
    places = [params["body"]["weight"].data_ptr(), params["head"][0].data_ptr()]
    for where, shown in (
        (("heda",), r"override\(\('heda',\), lr=0.2\)"),
        (("head", 7), r"override\(\('head', 7\), lr=0.2\)"),
        (is_scale, r"override\(is_scale at .*test_overrides_for_none.py:\d+, lr=0.2\)"),
    ):
        optimizer = sgd(0.1).override(where, lr=0.2)
        with pytest.raises(ValueError, match=shown) as caught:
            WAYS[way](optimizer, params)
        assert "there are 'body.bias', 'body.weight', 'head.0', 'head.1'" in str(caught.value)
        assert "if_any(where)" in str(caught.value)
    assert [params["body"]["weight"].data_ptr(), params["head"][0].data_ptr()] == places


@pytest.mark.parametrize("way", WAYS)
def test_each_way_takes_what_may_be_meant_for_none(way: str) -> None:
    optimizer = sgd(0.1).override(if_any(is_scale), lr=0.2).override(("head",), lr=0.3)
    WAYS[way](optimizer, tree())


def test_no_file_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is meant for no parameter"):
        export_step(sgd().override(("x",), lr=0.2), tree(), tmp_path / "step.pt2")
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("way", ["init", "bind"])
def test_one_optimizer_steps_each_part_of_a_tree(way: str) -> None:
    """As ranks would step it, each its part, of which some hold no leaf of an override."""
    optimizer = sgd(0.1).override(if_any(("head",)), lr=0.2)
    optimizer = optimizer.override(if_any(("body", "bias")), weight_decay=0.5)
    whole = tree()
    optimizer.update_(whole, tree(), optimizer.init(whole))
    for name, part in tree().items():
        params, grads = {name: part}, {name: tree()[name]}
        if way == "init":
            optimizer.update_(params, grads, optimizer.init(params))
        else:
            optimizer.bind(params).step(grads)
        assert_same(params[name], whole[name])


def test_pointwise_is_asked_of_one_tensor_which_no_override_is_meant_for() -> None:
    require_pointwise(sgd(0.1).override(lambda path: path[-1] == "bias", weight_decay=0.5))
