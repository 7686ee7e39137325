"""Wrong inputs of leaves are refused before anything is written, with a clear error."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    LeafInput,
    NoState,
    Optimizer,
    Rule,
    accumulate,
    adahessian,
    adamw,
    chain,
    clip_by_global_norm,
    descend,
    partition,
    sam,
    scale_by_adahessian,
    scale_by_sophia,
    sgd,
    sophia,
)
from functional_optim.frontends.local_optimizer import local_optimizer
from hooks import apply_optimizer_in_backward

from ..choices import case
from ..tensors import assert_same, normal
from .front_ends import cloned
from .second_order import estimates_at, given_at
from .test_refusals import WAYS
from .test_views import POLYAK
from .trees import grads_at, kind, params_of

WRONG: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "shape": (
        lambda one: one[:2],
        ValueError,
        r"'hessian' at 'body.weight' has shape \(2, 5\), but its .* \(6, 5\): give a number for",
    ),
    "dtype": (
        lambda one: one.double(),
        ValueError,
        r"has dtype torch.float64, but .* torch.float32: convert it by .to\(torch.float32\)",
    ),
    "device": (
        lambda one: one.to("meta"),
        ValueError,
        r"has device meta, but its parameter has device cpu: move it by .to\('cpu'\)",
    ),
    "sparse": (
        lambda one: one.to_sparse(),
        ValueError,
        r"'hessian' at 'body.weight' has layout torch.sparse_coo.*give to_dense\(\)",
    ),
    "no tensor": (lambda one: 3.0, TypeError, r"at 'body.weight' must be a tensor .* got 3.0"),
    "missing": (
        lambda one: None,
        ValueError,
        r"extra\['hessian'\] has no tensor for 'body.weight', which scale_by_.* needs",
    ),
}
"""Changes of one leaf's input, each with its error and its message."""

OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sophia": lambda: sophia(0.1),
    "adahessian": lambda: adahessian(0.1),
    "clipped": lambda: chain(scale_by_adahessian(), clip_by_global_norm(1.0), descend(0.1)),
    "parts": lambda: partition({"matrices": adahessian(0.1), "rest": adamw()}, kind),
}


def assert_refused(
    optimizer: Optimizer, error: type[Exception], match: str, extra: Any, grads: Any = None
) -> None:
    """Make sure that ``update`` and ``update_`` raise the error and change nothing."""
    params, grads = params_of(), grads_at(0) if grads is None else grads
    state = optimizer.init(params)
    with pytest.raises(error, match=match):
        optimizer.update(params, grads, state, extra=extra)
    with pytest.raises(error, match=match):
        optimizer.update_(params, grads, state, extra=extra)
    assert_same((params, state), (params_of(), optimizer.init(params_of())))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_tensor_that_does_not_fit(name: str) -> None:
    for kind_of, (change, error, match) in WRONG.items():
        given = estimates_at(0)
        given["body.weight"] = change(given["body.weight"])
        with case(given=kind_of):
            assert_refused(OPTIMIZERS[name](), error, match, {"hessian": given})


def test_another_tree() -> None:
    fewer = estimates_at(0)
    del fewer["scale"]
    more = {**estimates_at(0), "other": torch.ones(1)}
    for given, match in {
        "fewer": (fewer, r"tree of extra\['hessian'\] must be .* no extra\['hessian'\] at 'scale'"),
        "more": (more, r"extra\['hessian'\] at 'other', where params have no leaf"),
        "a number": (1.0, r"the tree of extra\['hessian'\] must be that of params"),
    }.values():
        with case(given=match):
            assert_refused(sophia(0.1), ValueError, match, {"hessian": given})


def test_a_tensor_where_there_is_no_parameter() -> None:
    optimizer, params = sophia(), {"a": torch.ones(1), "b": None}
    state = optimizer.init(params)
    with pytest.raises(ValueError, match=r"has a tensor .* at 'b', but the parameter is None"):
        optimizer.update(
            params,
            {"a": torch.ones(1), "b": None},
            state,
            extra={"hessian": {"a": torch.ones(1), "b": torch.ones(1)}},
        )


def test_a_required_one_is_missing() -> None:
    for name in ("adahessian", "clipped", "parts"):
        with case(name=name):
            match = r"scale_by_adahessian needs 'hessian' of each parameter .* extra=\{'hessian'"
            assert_refused(OPTIMIZERS[name](), TypeError, match, {})
            optimizer, params = OPTIMIZERS[name](), params_of()
            state = optimizer.init(params)
            optimizer.update_(params, grads_at(0), state, extra={"hessian": estimates_at(0)})
            before = cloned((params, state))
            with pytest.raises(TypeError, match=match):  # the step has a plan now
                optimizer.update_(params, grads_at(1), state)
            assert_same((params, state), before)


def test_none_is_needed_where_nothing_is_stepped() -> None:
    """A leaf needs no input if it has no gradient, or if its stage does not run."""
    for name in ("sophia", "adahessian", "parts"):
        optimizer, params = OPTIMIZERS[name](), params_of()
        grads = grads_at(0, missing={0: "body.weight"})
        given = {**estimates_at(0), "body.weight": None}
        with case(name=name):
            state = optimizer.init(params)
            new, _ = optimizer.update(params, grads, state, extra={"hessian": given})
            assert new["body.weight"] is params["body.weight"]
    optimizer = OPTIMIZERS["adahessian"]()
    nothing = dict.fromkeys(params, None)
    assert_same(optimizer.update(params, nothing, optimizer.init(params))[0], params)
    rest = {**nothing, "scale": torch.ones(())}  # AdamW steps this leaf
    optimizer = OPTIMIZERS["parts"]()
    optimizer.update(params, rest, optimizer.init(params))


def test_one_that_a_gate_would_lose() -> None:
    for gate, what in ((accumulate(2), "accumulate"), (sam(), "sam")):
        match = f"'hessian'.* is for scale_by_sophia, and {what} lets no step through.*give it at"
        with case(gate=what):
            assert_refused(chain(gate, sophia(0.1)), ValueError, match, given_at(0))


def test_a_leaf_that_goes_on_with_what_a_gate_kept_needs_one_too() -> None:
    optimizer, params = chain(accumulate(2), adahessian(0.1)), params_of()
    state = optimizer.init(params)
    optimizer.update_(params, grads_at(0), state)
    grads = grads_at(1, missing={1: "scale"})
    given = {**estimates_at(1), "scale": None}
    with pytest.raises(ValueError, match="has no tensor for 'scale'"):
        optimizer.update_(params, grads, state, extra={"hessian": given})
    optimizer.update_(params, grads, state, extra=given_at(1))
    assert int(state.leaves["scale"].step) == 1


def test_a_name_that_nothing_takes() -> None:
    match = r"no stage takes the input 'hesian'; inputs of this chain: 'hessian'"
    for make in (sophia, adahessian):
        assert_refused(make(0.1), TypeError, match, {**given_at(0), "hesian": 1.0})
    with pytest.raises(TypeError, match=r"'hessian'; inputs of this chain: none"):
        sgd().update(params_of(), grads_at(0), sgd().init(params_of()), extra=given_at(0))


def test_a_total_of_a_stage_behind_one_that_lacks_its_input_says_so() -> None:
    """``measure`` asks for the loss only if an earlier stage needs it for this total."""
    params, grads = params_of(), grads_at(0)
    optimizer = chain(POLYAK(lr=1.0), clip_by_global_norm(1.0), sgd())
    state = optimizer.init(params)
    known = [torch.ones(1, dtype=torch.float64)]  # the total of POLYAK
    with pytest.raises(TypeError, match="polyak needs 'loss'"):
        optimizer.measure(params, grads, state, measured=known)
    optimizer.measure(params, grads, state, measured=known, extra={"loss": 1.0})
    with pytest.raises(TypeError, match="no stage takes the input 'lost'"):
        optimizer.measure(params, grads, state, extra={"loss": 1.0, "lost": 1.0})
    first = chain(clip_by_global_norm(1.0), POLYAK(lr=1.0))
    first.measure(params, grads, first.init(params))


FRONT_ENDS: dict[str, Callable[[Optimizer], object]] = {
    "in backward": lambda one: apply_optimizer_in_backward(one, [normal(2).requires_grad_()], {}),
    "workers": lambda one: local_optimizer(one, [normal(2).requires_grad_()]),
    **{way: lambda one, way=way: WAYS[way](one, params_of()) for way in WAYS},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_who_is_given_gradients_alone_says_so(name: str) -> None:
    """Front-ends that pass only gradients refuse Sophia and AdaHessian, and say what to use."""
    for make in (sophia, adahessian):
        match = r"takes only gradients, but scale_by_\w+ also needs 'hessian': use update"
        with case(optimizer=make.__name__), pytest.raises(TypeError, match=match):
            FRONT_ENDS[name](make())


class Kept(NamedTuple):
    weight: list[Tensor]


class KeptHyper(NamedTuple):
    lr: float


def stage(name: str = "mine", **changes: Any) -> Rule:
    """Return a rule that changes nothing, with some of its fields replaced."""
    usual: dict[str, Any] = {
        "hyper": KeptHyper,
        "state": Kept,
        "init": lambda param, hyper: Kept([]),
        "rule": lambda param, grad, state, c: (param, state),
        "inputs": (LeafInput("weight"),),
    }
    return Rule(name=name, **{**usual, **changes})


class Single(NamedTuple):
    weight: Tensor


def test_a_stage_whose_input_has_no_place_in_its_state() -> None:
    for state, what in ((NoState, "no field"), (Single, "Tensor"), (KeptHyper, "no field")):
        with case(state=state), pytest.raises(ValueError, match=rf"list\[Tensor\], got {what}"):
            stage(state=state)


def test_an_init_that_fills_it() -> None:
    rule = stage(init=lambda param, hyper: Kept([torch.zeros_like(param)]))
    with pytest.raises(TypeError, match=r"mine: init must leave the input 'weight' .* \[\]"):
        chain(rule(lr=0.1)).init(torch.ones(2))


def test_a_rule_that_hands_back_another() -> None:
    """A rule that returns another tensor for its input is refused: the tensor would be lost."""
    rule = stage(rule=lambda param, grad, state, c: (param, Kept([state.weight[0] * 2])))
    optimizer, param = chain(rule(lr=0.1)), torch.ones(2)
    with pytest.raises(TypeError, match=r"mine: must return the input 'weight'"):
        optimizer.update(param, param, optimizer.init(param), extra={"weight": param})


def test_a_name_of_a_leafs_input_is_no_name_of_a_number() -> None:
    rule = stage()
    with pytest.raises(ValueError, match=r"'loss' is .* of polyak.* of each leaf.* of other"):
        chain(POLYAK(lr=1.0), stage("other", state=Loss, inputs=(LeafInput("loss"),))(lr=0.1))
    chain(POLYAK(lr=1.0), rule(lr=0.1))


class Loss(NamedTuple):
    loss: list[Tensor]


def test_nothing_of_it_changes_what_others_are() -> None:
    """Chains without inputs stay simple, and equal chains compare equal."""
    assert not sgd().is_composed and sophia().is_composed
    assert chain(scale_by_sophia(), descend(0.1)) == chain(scale_by_sophia(), descend(0.1))
