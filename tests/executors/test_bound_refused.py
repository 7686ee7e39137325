"""What a bound optimizer cannot do is said before anything is changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from functional_optim import adamw
from functional_optim.bound import BoundOptimizer

from .bound_tree import NAMES, full, parameters
from .rules import VARIANTS
from .support import assert_same, copied, noise


def values(bound: BoundOptimizer) -> Any:
    return copied((bound.params, bound.state))


def wrong_shape(grads: dict[str, Any]) -> dict[str, Any]:
    return {**grads, "i": noise(0, 4, 3)}


def wrong_shape_apart(grads: dict[str, Any]) -> dict[str, Any]:
    return {**grads, "j": noise(0, 5)}


def wrong_dtype(grads: dict[str, Any]) -> dict[str, Any]:
    return {**grads, "i": noise(0, 3, 4, dtype=torch.float64)}


def wrong_dtype_and_missing(grads: dict[str, Any]) -> dict[str, Any]:
    return {**grads, "a": None, "i": noise(0, 3, 4, dtype=torch.float64)}


def a_number(grads: dict[str, Any]) -> dict[str, Any]:
    return {**grads, "i": 1.0}


def a_number_and_missing(grads: dict[str, Any]) -> dict[str, Any]:
    return {**grads, "a": None, "j": 1.0}


def another_tree(grads: dict[str, Any]) -> dict[str, Any]:
    return {key: grad for key, grad in grads.items() if key != "a"}


def of_nothing(grads: dict[str, Any]) -> dict[str, Any]:
    return {**grads, "h": noise(0, 3)}


def on_meta(grads: dict[str, Any]) -> dict[str, Any]:
    return {**grads, "b": torch.ones(7, device="meta")}


def sparse(grads: dict[str, Any]) -> dict[str, Any]:
    return {**grads, "a": torch.eye(3, 4).to_sparse()}


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "shape": (wrong_shape, ValueError, r"gradient at 'i' has shape \(4, 3\)"),
    "shape of one apart": (wrong_shape_apart, ValueError, r"gradient at 'j' has shape \(5,\)"),
    "dtype": (wrong_dtype, ValueError, "gradient at 'i' has dtype torch.float64"),
    "dtype, one missing": (wrong_dtype_and_missing, ValueError, "gradient at 'i' has dtype"),
    "a number": (a_number, TypeError, "gradient at 'i' must be a tensor"),
    "a number, one missing": (a_number_and_missing, TypeError, "gradient at 'j' must be a tensor"),
    "tree": (another_tree, ValueError, "gradients"),
    "of a parameter that is None": (of_nothing, ValueError, "gradient at 'h', but the parameter"),
    "device": (on_meta, ValueError, "gradient at 'b' has device meta"),
    "sparse": (sparse, RuntimeError, "gradient at 'a' has layout torch.sparse_coo"),
}


@pytest.mark.parametrize("executor", ["reference", "script", "blocked", "auto"])
@pytest.mark.parametrize("name", WRONG)
def test_a_step_that_fails_changes_nothing(name: str, executor: Any) -> None:
    change, error, match = WRONG[name]
    bound = VARIANTS["rmsprop centered"].using(executor=executor).bind(parameters())
    bound.step(full(1))
    before = values(bound)
    with pytest.raises(error, match=match):
        bound.step(change(full(2)))
    assert_same(values(bound), before)
    bound.step(full(2))  # and it goes on


@pytest.mark.parametrize("executor", ["reference", "script", "blocked", "auto", "fused"])
def test_hypers_that_are_wrong_change_nothing(executor: Any) -> None:
    bound = adamw(0.1).using(executor=executor).bind({"a": noise(0, 5), "b": noise(1, 70_001)})
    grads = {"a": noise(2, 5), "b": noise(3, 70_001)}
    bound.step(grads)
    before = values(bound)
    for wrong, error, match in (
        ({"lr": -1.0}, ValueError, "lr must be"),
        ({"speed": 1.0}, TypeError, "speed"),
        ({"amsgrad": True}, ValueError, "max_exp_avg_sq is missing"),
        ({"lr": lambda made: -1.0}, ValueError, "from its schedule"),
    ):
        with pytest.raises(error, match=match):
            bound.step(grads, **wrong)
        assert_same(values(bound), before)
    for wrong, error, match in (
        ({"lr": -1.0}, ValueError, "lr must be"),
        ({"amsgrad": True}, ValueError, "max_exp_avg_sq is missing"),
    ):
        with pytest.raises(error, match=match):
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
        with pytest.raises(ValueError, match="from its schedule"):
            bound.step(grads)
        assert_same(values(bound), before)


def repointed(bound: BoundOptimizer) -> None:
    bound.params["a"].data = noise(5, 3, 4)


def halved(bound: BoundOptimizer) -> None:
    bound.params["a"].data = bound.params["a"].data.half()


def reshaped(bound: BoundOptimizer) -> None:
    bound.params["b"].data = bound.params["b"].data.view(7, 1)


def resized_param(bound: BoundOptimizer) -> None:
    bound.params["b"].resize_(3)


def resized_storage(bound: BoundOptimizer) -> None:
    bound.params["a"].untyped_storage().resize_(0)


def resized_state(bound: BoundOptimizer) -> None:
    storage = bound.state.leaves["a"].stages[-1].square_avg.untyped_storage()
    storage.resize_(4 * storage.nbytes())


def resized_gradients(bound: BoundOptimizer) -> None:
    bound.gradients["a"].untyped_storage().resize_(8)


def released(bound: BoundOptimizer) -> None:
    bound.release()


@pytest.mark.parametrize("executor", ["reference", "blocked", "auto"])
@pytest.mark.parametrize(
    "meddle",
    [
        repointed,
        halved,
        reshaped,
        resized_param,
        resized_storage,
        resized_state,
        resized_gradients,
        released,
    ],
)
def test_memory_that_someone_has_changed_is_an_error(
    meddle: Callable[[BoundOptimizer], None], executor: Any
) -> None:
    names = [name for name in NAMES if name in "abe"]
    bound = (
        VARIANTS["rmsprop centered"]
        .using(executor=executor)
        .bind({name: parameters()[name] for name in names})
    )
    grads = {name: full(1)[name] for name in names}
    bound.step(grads)
    meddle(bound)
    whole = meddle is not resized_storage
    before = values(bound) if whole else None
    versions = [bound.params[name]._version for name in names]
    with pytest.raises(RuntimeError):
        bound.step(grads)
    assert [bound.params[name]._version for name in names] == versions
    if whole:
        assert_same(values(bound), before)
