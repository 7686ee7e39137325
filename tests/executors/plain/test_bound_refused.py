"""Refusals of a bound optimizer, raised before anything is changed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import NoState, Rule, adamw, chain
from functional_optim.kernels.errors import NotPointwiseError
from functional_optim.optimizer.bound import BoundOptimizer

from ...choices import case, pairs
from ..bound_tree import NAMES, full, parameters
from ..rules import VARIANTS
from ..support import LARGE, assert_same, copied, noise


def values(bound: BoundOptimizer) -> Any:
    return copied((bound.params, bound.state))


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "shape": ({"i": noise(0, 4, 3)}, ValueError, r"gradient at 'i' has shape \(4, 3\)"),
    "shape of one apart": ({"j": noise(0, 5)}, ValueError, r"gradient at 'j' has shape \(5,\)"),
    "dtype": (
        {"i": noise(0, 3, 4).double()},
        ValueError,
        "gradient at 'i' has dtype torch.float64",
    ),
    "dtype, one missing": (
        {"a": None, "i": noise(0, 3, 4).double()},
        ValueError,
        "gradient at 'i' has dtype",
    ),
    "a number": ({"i": 1.0}, TypeError, "gradient at 'i' must be a tensor"),
    "a number, one missing": (
        {"a": None, "j": 1.0},
        TypeError,
        "gradient at 'j' must be a tensor",
    ),
    "of a parameter that is None": (
        {"h": noise(0, 3)},
        ValueError,
        "gradient at 'h', but the parameter",
    ),
    "another tree": ({"k": noise(0, 3)}, ValueError, "gradients"),
    "device": (
        {"b": torch.ones(7, device="meta")},
        ValueError,
        "gradient at 'b' has device meta",
    ),
    "sparse": (
        {"a": torch.eye(3, 4).to_sparse()},
        RuntimeError,
        "gradient at 'a' has layout torch.sparse_coo",
    ),
}


def test_gradients_that_are_wrong_change_nothing(executors: Any) -> None:
    for one in pairs(executor=executors, name=WRONG):
        bound = VARIANTS["rmsprop centered"].using(executor=one["executor"]).bind(parameters())
        bound.step(full(1))
        before = values(bound)
        change, error, match = WRONG[one["name"]]
        with case(**one):
            with pytest.raises(error, match=match):
                bound.step({**full(2), **change})
            assert_same(values(bound), before)
            bound.step(full(2))  # the next step works


ONCE = [
    ({"lr": -1.0}, ValueError, "lr must be"),
    ({"speed": 1.0}, TypeError, "speed"),
    ({"amsgrad": True}, ValueError, "max_exp_avg_sq is missing"),
    ({"lr": lambda made: -1.0}, ValueError, "from its schedule"),
]


def test_hypers_that_are_wrong_change_nothing(executors: Any) -> None:
    for executor in executors:
        bound = adamw(0.1).using(executor=executor).bind({"a": noise(0, 5), "b": noise(1, LARGE)})
        grads = {"a": noise(2, 5), "b": noise(3, LARGE)}
        bound.step(grads)
        before = values(bound)
        for wrong, error, match in ONCE:
            with case(executor=executor, wrong=wrong):
                with pytest.raises(error, match=match):
                    bound.step(grads, **wrong)
                assert_same(values(bound), before)
        for wrong, error, match in (ONCE[0], ONCE[2]):
            with case(executor=executor, set=wrong), pytest.raises(error, match=match):
                bound.set_hyper(**wrong)
        bound.step(grads)
        assert int(bound.state.leaves["a"].step) == 2


def test_a_schedule_that_fails_for_some_changes_nothing() -> None:
    def failing(made: float) -> float:
        return 0.1 if made < 1 else -1.0

    for key in ("j", "b"):
        optimizer = adamw(0.1).override((key,), lr=failing).using(executor="blocked")
        bound = optimizer.bind({key: p for key, p in parameters().items() if key in "abj"})
        grads = {key: g for key, g in full(1).items() if key in "abj"}
        bound.step(grads)
        before = values(bound)
        with case(key=key), pytest.raises(ValueError, match="from its schedule"):
            bound.step(grads)
        assert_same(values(bound), before)


def repointed(bound: BoundOptimizer) -> None:
    bound.params["a"].data = noise(5, 3, 4)


def halved(bound: BoundOptimizer) -> None:
    bound.params["a"].data = bound.params["a"].data.half()


def reshaped(bound: BoundOptimizer) -> None:
    bound.params["b"].data = bound.params["b"].data.view(7, 1)


def resized_state(bound: BoundOptimizer) -> None:
    storage = bound.state.leaves["a"].stages[-1].square_avg.untyped_storage()
    storage.resize_(4 * storage.nbytes())


def repointed_state(bound: BoundOptimizer) -> None:
    square_avg = bound.state.leaves["b"].stages[-1].square_avg
    square_avg.data = square_avg.detach().clone()


def repointed_count(bound: BoundOptimizer) -> None:
    bound.state.leaves["e"].step.data = torch.tensor(7)


MEDDLING: dict[str, tuple[Callable[[BoundOptimizer], object], str]] = {
    "repointed": (repointed, "'a' has left its flat buffer"),
    "halved": (halved, "'a'"),
    "reshaped": (reshaped, "'b'"),
    "resized": (lambda bound: bound.params["b"].resize_(3), "'b'"),
    "resized state": (resized_state, "was resized or given other memory"),
    "repointed state": (repointed_state, "the state of 'b' was resized or given other memory"),
    "repointed count": (repointed_count, "the state of 'e' was resized or given other memory"),
    "resized gradients": (
        lambda bound: bound.gradients["a"].untyped_storage().resize_(8),
        "was resized or given other memory",
    ),
    "released": (lambda bound: bound.release(), "was undone"),
}


def test_memory_that_someone_has_changed_is_an_error(executors: Any) -> None:
    """A step with changed memory raises before it writes, also if the step is planned."""
    names = [name for name in NAMES if name in "abe"]
    for one in pairs(executor=executors, name=MEDDLING, steps=[1, 3], own=[True, False]):
        optimizer = VARIANTS["rmsprop centered"].using(executor=one["executor"])
        bound = optimizer.bind({name: parameters()[name] for name in names})
        grads = bound.gradients if one["own"] else {name: full(1)[name] for name in names}
        for _ in range(one["steps"]):
            bound.step(grads)
        meddle, match = MEDDLING[one["name"]]
        meddle(bound)
        before = values(bound)
        versions = [bound.params[name]._version for name in names]
        with case(**one):
            with pytest.raises(RuntimeError, match=match):
                bound.step(grads)
            assert [bound.params[name]._version for name in names] == versions
            assert_same(values(bound), before)


def test_a_parameter_that_becomes_a_result_of_autograd_is_an_error(executors: Any) -> None:
    """``bind`` refuses such a parameter, and so does a step, also if it is planned."""
    names = [name for name in NAMES if name in "abe"]
    for one in pairs(executor=executors, steps=[0, 1, 3], own=[True, False]):
        optimizer = VARIANTS["rmsprop centered"].using(executor=one["executor"])
        bound = optimizer.bind({name: parameters()[name] for name in names})
        grads = bound.gradients if one["own"] else {name: full(1)[name] for name in names}
        for _ in range(one["steps"]):
            bound.step(grads)
        param = bound.params["b"].requires_grad_(False)
        param.mul_(torch.ones_like(param, requires_grad=True))
        assert not param.is_leaf
        before = values(bound)
        with case(**one):
            with pytest.raises(ValueError, match="parameter at 'b' is not a leaf of autograd"):
                bound.step(grads)
            assert_same(values(bound), before)
            param.detach_()
            bound.step(grads)
            assert not torch.equal(param, before[0]["b"])


def test_a_result_of_autograd_that_is_not_stepped_is_no_error(executors: Any) -> None:
    for executor in executors:
        bound = adamw(0.1).using(executor=executor).bind({"a": noise(0, 5), "b": noise(1, 5)})
        bound.params["b"].mul_(torch.ones(5, requires_grad=True))
        before = bound.params["a"].clone()
        with case(executor=executor):
            bound.step({"a": noise(2, 5), "b": None})
            assert not torch.equal(bound.params["a"], before)
            with pytest.raises(ValueError, match="parameter at 'b' is not a leaf of autograd"):
                bound.step({"a": noise(2, 5), "b": noise(3, 5)})


class Hyper(NamedTuple):
    lr: float
    centred: bool


def centred(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    """Step pointwise, or by the centred gradient if ``centred`` is set."""
    return param - c.lr * (grad - grad.mean() if c.centred else grad), state


def test_what_one_of_several_buffers_is_refused_for_changes_none() -> None:
    """A step checks all buffers before it writes; once, it had already stepped some of them."""
    rule = Rule(name="centred", hyper=Hyper, rule=centred)
    optimizer = chain(rule(lr=0.1, centred=False)).override(("b",), centred=True)
    for executor in ("blocked", "auto"):
        bound = optimizer.using(executor=executor).bind({"a": noise(0, 5), "b": noise(1, 5)})
        before = values(bound)
        with case(executor=executor), pytest.raises(NotPointwiseError, match="kind='per_matrix'"):
            bound.step({"a": noise(2, 5), "b": noise(3, 5)})
        assert_same(values(bound), before)
