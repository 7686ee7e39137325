"""partition, masked and freeze: only its own chain steps a leaf."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from functional_optim import (
    accumulate,
    adamw,
    chain,
    clip_by_global_norm,
    ema,
    freeze,
    if_any,
    labels,
    lion,
    masked,
    matching,
    partition,
    sgd,
    weight_decay,
    with_shape,
)
from functional_optim.core.selectors import Selector

from ..choices import case
from ..tensors import assert_same
from .trees import SHAPES, STEPS, grads_at, kind, params_of, run_of, two_parts


def test_each_part_is_its_own_optimizer() -> None:
    """Each part matches its optimizer alone in every bit, parameters and state."""
    params, state = run_of(two_parts())
    ours = {"matrices": sgd(0.1, momentum=0.9), "rest": adamw(0.01)}
    for label, optimizer in ours.items():
        want, own = run_of(optimizer)
        for name in [name for name, shape in SHAPES.items() if kind((name,), shape) == label]:
            with case(name=name):
                assert_same(params[name], want[name])
                assert_same(state.leaves[name], own.leaves[name])


def test_a_clip_before_parts_takes_the_norm_of_all() -> None:
    optimizer = chain(clip_by_global_norm(0.5), two_parts())
    ours = run_of(optimizer, 1)[0]
    grads = grads_at(0)
    norm = torch.stack([grad.double().square().sum() for grad in grads.values()]).sum().sqrt()
    scaled = {name: grad * (0.5 / (norm + 1e-6)).to(grad.dtype) for name, grad in grads.items()}
    params = params_of()
    want, _ = two_parts().update(params, scaled, two_parts().init(params))
    for name in params:
        torch.testing.assert_close(ours[name] - params[name], want[name] - params[name])


def test_hyper_parameters_have_the_label_in_front() -> None:
    optimizer = chain(clip_by_global_norm(0.5), two_parts())
    assert optimizer.hyper["matrices.lr"] == 0.1
    assert optimizer.hyper["rest.lr"] == 0.01
    assert optimizer.hyper["max_norm"] == 0.5
    changed = optimizer.replace(**{"rest.lr": 0.5})
    assert (changed.hyper["rest.lr"], changed.hyper["matrices.lr"]) == (0.5, 0.1)
    with pytest.raises(TypeError, match=r"did you mean matrices\.lr or rest\.lr"):
        optimizer.replace(lr=0.5)


def test_overrides_of_a_part_hold_in_the_part() -> None:
    part = adamw(0.01).override(matching("*bias"), lr=0.5, weight_decay=0.0)
    optimizer = partition({"matrices": sgd(0.1), "rest": part}, kind)
    params, grads = params_of(), grads_at(0)
    ours, _ = optimizer.update(params, grads, optimizer.init(params))
    want, _ = part.update(params, grads, part.init(params))
    assert_same(ours["body.bias"], want["body.bias"])
    later = optimizer.override(matching("scale"), **{"rest.lr": 1.0})
    assert later.hypers_at(("scale",), ())[-1].lr == 1.0
    assert later.hypers_at(("body.bias",), (6,))[-1].lr == 0.5


def test_parts_of_parts_have_both_labels() -> None:
    inner = partition(
        {"bias": sgd(0.5), "other": lion(0.25)},
        labels({"bias": matching("*bias")}, default="other"),
    )
    optimizer = partition({"matrices": adamw(0.1), "rest": inner}, kind)
    assert optimizer.hyper["rest.bias.lr"] == 0.5
    params = run_of(optimizer)[0]
    assert_same(params["body.bias"], run_of(sgd(0.5))[0]["body.bias"])
    assert_same(params["scale"], run_of(lion(0.25))[0]["scale"])
    assert_same(params["head.weight"], run_of(adamw(0.1))[0]["head.weight"])


def test_what_is_frozen_stays_and_has_no_part_in_the_norm() -> None:
    optimizer = chain(freeze(matching("head*")), clip_by_global_norm(0.5), sgd(0.1))
    params, state = run_of(optimizer)
    assert_same(params["head.weight"], params_of()["head.weight"])
    assert int(state.leaves["head.weight"].step) == 0
    others: dict[str, torch.Tensor | None] = {}
    plain = chain(clip_by_global_norm(0.5), sgd(0.1))
    want = params_of()
    own = plain.init(want)
    for step in range(STEPS):
        others = {**grads_at(step), "head.weight": None}
        want, own = plain.update(want, others, own)
    assert_same(params, want)


def test_a_part_may_be_frozen() -> None:
    optimizer = partition({"matrices": freeze(), "rest": sgd(0.1)}, kind)
    params = run_of(optimizer)[0]
    assert_same(params["body.weight"], params_of()["body.weight"])
    assert_same(params["scale"], run_of(sgd(0.1))[0]["scale"])


def test_a_masked_stage_acts_on_its_leaves_only() -> None:
    is_matrix = with_shape(lambda shape: len(shape) == 2)
    optimizer = chain(masked(weight_decay(0.5), is_matrix), sgd(0.1))
    params = run_of(optimizer)[0]
    decayed, plain = run_of(sgd(0.1, weight_decay=0.5))[0], run_of(sgd(0.1))[0]
    for name, shape in SHAPES.items():
        with case(name=name):
            assert_same(params[name], (decayed if len(shape) == 2 else plain)[name])


def test_stages_stand_in_any_order() -> None:
    """A chain may have stages in any order, and several rules."""
    params, state = run_of(chain(sgd(0.1), ema(0.5), weight_decay(0.0), sgd(0.1)))
    assert int(state.leaves["scale"].step) == STEPS
    twice = run_of(chain(sgd(0.1), sgd(0.1)))[0]
    assert_same(params, twice)


WRONG = {
    "no label": (lambda: partition({"a": sgd()}, lambda path, shape: "b"), "no rule acts on"),
    "another label": (
        lambda: partition({"muon": sgd(), "rest": sgd()}, labels({}, default="moun")),
        "no rule acts on .*: its label is 'moun', and the partition has parts for 'muon', 'rest'",
    ),
    "without default": (
        lambda: chain(accumulate(2), partition({"a": sgd()}, labels({"a": if_any(("b",))}))),
        "no rule acts on .*: its label is None, and the partition has parts for 'a'",
    ),
    "another label inside": (
        lambda: partition(
            {"a": partition({"c": sgd()}, lambda path, shape: "d"), "b": sgd()},
            lambda path, shape: "a",
        ),
        "no rule acts on .*: its label is 'd', and the partition has parts for 'c'",
    ),
    "label_of": (lambda: partition({"a": sgd()}, "a"), "must be a function"),
    "no parts": (lambda: partition({}, kind), "at least one"),
    "a link": (lambda: partition({"a": weight_decay(0.1)}, kind), "must be an optimizer"),
    "a dot": (lambda: partition({"a.b": sgd()}, kind), "letters, digits"),
    "a list": (lambda: partition([sgd()], kind), "by label"),
    "where": (lambda: masked(sgd(), ["body"]), "where must be"),
    "what": (lambda: masked("sgd", ("body",)), "chain takes links"),
    "all masked": (lambda: masked(sgd(), ("body.bias",)), "no rule acts on .*freeze"),
    "lr of parts": (lambda: chain(decay(), two_parts()), "each part has its own"),
}


def decay() -> object:
    from functional_optim import decoupled_weight_decay

    return decoupled_weight_decay(0.1)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_before_a_step(name: str) -> None:
    make, told = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=told):
        make().init(params_of())


def test_selectors_are_joined_and_negated() -> None:
    bias, matrix = matching("*bias"), with_shape(lambda shape: len(shape) == 2)
    chosen = {
        "and": bias & matrix,
        "or": bias | matrix,
        "not": ~bias,
        "a tuple": matching("nothing") | ("scale",),
    }
    found = {
        name: [one for one, shape in SHAPES.items() if where.selects((one,), shape)]
        for name, where in chosen.items()
    }
    assert found == {
        "and": [],
        "or": ["body.weight", "body.bias", "head.weight"],
        "not": ["body.weight", "head.weight", "scale"],
        "a tuple": ["scale"],
    }
    with pytest.raises(ValueError, match="pass the shape too"):
        two_parts().hypers_at(("scale",))


def test_it_is_written_as_it_is_made() -> None:
    assert repr(two_parts()).startswith("partition(\n    {\n        'matrices': sgd(")
    assert repr(two_parts()).endswith("    },\n    kind,\n)")
    assert "masked(weight_decay(weight_decay=0.5), matching('*bias'))" in repr(
        chain(masked(weight_decay(0.5), matching("*bias")), sgd())
    )


def test_bounds_on_shapes_select_what_predicates_do() -> None:
    """Bounds on shapes select the same leaves as predicates do (fault 27).

    An optimizer with bounds can be pickled, and its repr evaluates to an equal selector.
    """
    shapes: list[tuple[int, ...]] = [(), (0,), (3,), (2, 3), (4, 0), (1, 2, 3)]
    bounds: list[tuple[Selector, Callable[[Any], bool]]] = [
        (with_shape(ndim=2), lambda shape: len(shape) == 2),
        (with_shape(min_ndim=2), lambda shape: len(shape) >= 2),
        (with_shape(max_ndim=1), lambda shape: len(shape) <= 1),
        (with_shape(min_numel=3), lambda shape: math.prod(shape) >= 3),
        (with_shape(max_numel=3), lambda shape: math.prod(shape) <= 3),
        (with_shape(ndim=2, min_numel=1), lambda shape: shape == (2, 3)),
        (with_shape(has_three, max_ndim=1), lambda shape: shape == (3,)),
    ]
    for where, told in bounds:
        for shape in shapes:
            with case(where=where, shape=shape):
                assert where.selects(("w",), shape) == told(shape)
        optimizer = sgd().override(where, lr=0.5)
        assert pickle.loads(pickle.dumps(optimizer)) == optimizer
        assert eval(repr(where)) == where
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (with_shape, TypeError, "at least one of ndim"),
        (lambda: with_shape(ndim=2.0), TypeError, "ndim must be a whole number"),  # type: ignore[arg-type]
        (lambda: with_shape(min_numel=-1), ValueError, "min_numel must be >= 0"),
        (lambda: with_shape(2), TypeError, "function of a shape"),  # type: ignore[arg-type]
    ]
    for make, error, why in wrong:
        with pytest.raises(error, match=why):
            make()


def has_three(shape: tuple[int, ...]) -> bool:
    return 3 in shape
