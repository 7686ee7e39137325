"""Overrides that match no parameter, which are refused before anything is made."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from functional_optim import export_step, if_any, sgd
from functional_optim.core.unmatched_selectors import check_used
from functional_optim.optimizer.pointwise_check import require_pointwise
from tests.choices import each_value

from .support import assert_same
from .ways import COMPILING, MEANT_FOR_SOME, WAYS_TO_BEGIN, Way, body_and_head, is_scale

UNMEANT: list[tuple[Any, str]] = [
    (("heda",), r"override\(\('heda',\), lr=0.2\)"),
    (("head", 7), r"override\(\('head', 7\), lr=0.2\)"),
    (is_scale, r"override\(is_scale at .*ways.py:\d+, lr=0.2\)"),
]


@each_value(way=WAYS_TO_BEGIN, unmeant=UNMEANT)
def test_it_names_the_pattern_and_what_there_is(way: Way, unmeant: tuple[Any, str]) -> None:
    params, (where, shown) = body_and_head(), unmeant
    places = [params["body"]["weight"].data_ptr(), params["head"][0].data_ptr()]
    with pytest.raises(ValueError, match=shown) as caught:
        way(sgd(0.1).override(where, lr=0.2), params)
    assert "the parameters are 'body.bias', 'body.weight', 'head.0', 'head.1'" in str(caught.value)
    assert "if_any(where)" in str(caught.value)
    assert [params["body"]["weight"].data_ptr(), params["head"][0].data_ptr()] == places


@each_value(way={name: way for name, way in WAYS_TO_BEGIN.items() if name not in COMPILING})
def test_each_way_takes_what_may_be_meant_for_none(way: Way) -> None:
    way(MEANT_FOR_SOME, body_and_head())


def test_no_file_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="matches no parameter"):
        export_step(sgd().override(("x",), lr=0.2), body_and_head(), tmp_path / "step.pt2")
    assert list(tmp_path.iterdir()) == []


def test_of_many_paths_some_are_named() -> None:
    paths = [(index,) for index in range(50)]
    overrides = sgd().override(("x",), lr=0.2).overrides
    with pytest.raises(ValueError, match=r"none but numbers \('0', .*'7' and 42 more\)"):
        check_used((), overrides, paths, paths)
    with pytest.raises(ValueError, match="the parameters are none"):
        check_used((), overrides, [], [])


@each_value(where=[(), ("head",), ("head", 1), lambda path: path[-1] == "bias"])
def test_what_is_meant_for_some_is_right(where: Any) -> None:
    """A leaf that is None also matches, because it can become a parameter later."""
    optimizer, params = sgd(0.1).override(where, lr=0.2), body_and_head()
    bound = optimizer.bind(body_and_head())
    bound.step(body_and_head())
    optimizer.update_(params, body_and_head(), optimizer.init(params))
    assert_same(bound.params, params)


def test_there_may_be_none_where_that_is_said() -> None:
    optimizer = sgd(0.1).override(if_any(is_scale), lr=0.2).override(if_any(("head",)), lr=0.3)
    bound = optimizer.bind(body_and_head())
    assert bound.optimizer.hypers_at(("head", 0))[-1].lr == 0.3
    assert bound.optimizer.hypers_at(("body", "scale"))[-1].lr == 0.2
    assert bound.optimizer.hypers_at(("body", "bias"))[-1].lr == 0.1
    assert if_any(if_any(is_scale)) == if_any(is_scale)
    assert pickle.loads(pickle.dumps(optimizer)) == optimizer


def test_one_optimizer_steps_each_part_of_a_tree() -> None:
    """Ranks step one part each, and some parts have no leaf of an override."""
    optimizer = sgd(0.1).override(if_any(("head",)), lr=0.2)
    optimizer = optimizer.override(if_any(("body", "bias")), weight_decay=0.5)
    whole = body_and_head()
    optimizer.update_(whole, body_and_head(), optimizer.init(whole))
    for name in whole:
        grads = {name: body_and_head()[name]}
        params, written = ({name: body_and_head()[name]} for _ in range(2))
        optimizer.update_(written, grads, optimizer.init(written))
        optimizer.bind(params).step(grads)
        assert_same(written[name], whole[name])
        assert_same(params[name], whole[name])


def test_pointwise_is_asked_of_one_tensor_which_no_override_is_meant_for() -> None:
    require_pointwise(sgd(0.1).override(lambda path: path[-1] == "bias", weight_decay=0.5))
