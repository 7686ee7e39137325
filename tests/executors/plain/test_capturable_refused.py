"""Refusals of captured steps, raised before anything is changed."""

import math
from typing import Any

import pytest
import torch

from functional_optim import adamw, chain, clip_by_global_norm, sgd, stored
from functional_optim.core.leaf import Leaf
from functional_optim.kernels import EXECUTORS, KernelExecutor
from functional_optim.kernels.errors import UntraceableError

from ...choices import case
from ..capturing import REFERENCE, assert_close, captured, gradients, steps, tree
from ..graph_recorder import Graph
from ..rules import stateless
from ..support import assert_same, copied, noise

pytestmark = pytest.mark.usefixtures("captured_on_the_cpu")


def test_rules_that_look_at_their_numbers_are_refused() -> None:
    for kind in ("pointwise", "per_matrix"):
        optimizer = stateless(lambda p, g, s, c: (p - math.sqrt(c.lr) * g, s), "looks", kind=kind)
        said = r"\(looks\) cannot be stepped with scalars on"
        with case(kind=kind), pytest.raises(UntraceableError, match=said):
            optimizer.bind(tree(), capturable=True)


def test_other_gradients_than_were_captured_are_an_error() -> None:
    bound = captured(REFERENCE)
    before = copied((bound.params, bound.state))
    with pytest.raises(RuntimeError, match=r"'b' now differs.*a gradient of zeros"):
        bound.step({**gradients()(0), "b": None})
    assert_same((bound.params, bound.state), before)


def test_other_counts_than_were_captured_are_an_error() -> None:
    bound = captured(REFERENCE)
    plain = REFERENCE.bind(tree())
    plain.step({**gradients()(0), "b": None})
    before = copied((bound.params, bound.state))
    with pytest.raises(RuntimeError, match="are now at 1 and 0: bind the parameters again"):
        bound.load_state(plain.state)
    assert_same((bound.params, bound.state), before)
    bound.state.leaves["b"].step.add_(1)
    with pytest.raises(RuntimeError, match="bind the parameters again"):
        bound.step(gradients()(0))
    assert_same(bound.params, before[0])


def test_numbers_for_one_step_are_an_error() -> None:
    with pytest.raises(TypeError, match="use set_hyper"):
        REFERENCE.bind(tree(), capturable=True).step(gradients()(0), lr=0.2)


def test_hyper_parameters_are_not_captured() -> None:
    bound = REFERENCE.bind(tree(), capturable=True)
    with pytest.raises(RuntimeError, match="set_hyper before, or between"), Graph().recording():
        bound.set_hyper(lr=0.2)


MORE = {
    "lr was a number, and is to be the schedule": {"lr": lambda k: 0.1},
    "lr was a number, and is to be a tensor": {"lr": torch.tensor(0.3)},
    "a flag or a whole number": {"nesterov": False},
    "a stage decides by weight_decay": {"weight_decay": 0.1},
}


def test_what_is_more_than_a_number_cannot_be_set_once_captured() -> None:
    bound = captured(sgd(0.1, momentum=0.9, nesterov=True).using(executor="reference"))
    kept = bound.optimizer
    for text, value in MORE.items():
        with pytest.raises(ValueError, match=text):
            bound.set_hyper(**value)
        assert bound.optimizer is kept
        bound.step(gradients()(1))
    rate = torch.full((1,), 0.1, dtype=torch.float64)
    bound = captured(adamw(rate).using(executor="reference"))
    bound.set_hyper(lr=bound.optimizer.hyper["lr"])  # the same tensor each time
    with pytest.raises(ValueError, match="lr was a tensor, and is to be another one .fill_"):
        bound.set_hyper(lr=rate)


def test_values_that_are_refused_change_nothing() -> None:
    bound = REFERENCE.bind(tree(), capturable=True)
    kept = bound.optimizer
    for value, text in ((-1.0, "lr must be"), (lambda k: 0.1 if k < 2 else 0.01, "a branch")):
        with pytest.raises(ValueError, match=text):
            bound.set_hyper(lr=value)
        assert bound.optimizer is kept
    bound.step(gradients()(0))
    assert_close(bound.params, steps(REFERENCE, tree(), gradients(), count=1)[0])


def test_executors_that_take_pythons_numbers_are_refused() -> None:
    for executor in ("blocked", "fused"):
        params = tree()
        where = params["a"].data_ptr()
        with pytest.raises(ValueError, match="'auto' or .*'reference'"):
            adamw(0.1).using(executor=executor).bind(params, capturable=True)
        assert params["a"].data_ptr() == where


def test_schedules_that_look_at_the_step_are_refused() -> None:
    optimizer = adamw(lambda k: 0.1 if k < 3 else 0.01)
    with pytest.raises(ValueError, match="write it with torch's operations, without a branch"):
        optimizer.bind(tree(), capturable=True)


def test_state_on_another_kind_of_device_is_refused() -> None:
    optimizer = stored(adamw(0.1), state="float32", state_device="cpu")
    with pytest.raises(ValueError, match="keeps its state on cpu"):
        optimizer.bind({"a": torch.empty(600, device="meta")}, capturable=True)


def test_without_it_the_error_says_what_to_do() -> None:
    bound = adamw(0.1).bind(tree())
    bound._uncaptured = list(bound.params.values())  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="capturable=True"), Graph().recording():
        bound.step(bound.gradients)


def test_what_cannot_be_bound_leaves_parameters_as_they_were() -> None:
    """Binding fails if a number in double precision would widen a 0-d parameter."""
    params = {"a": noise(0, 4), "b": noise(1)}
    optimizer = stateless(lambda p, g, s, c: (p - c.lr * g, s), kind="per_matrix")
    with pytest.raises(UntraceableError, match="torch.float64; it must keep both"):
        optimizer.bind(params, capturable=True)
    assert all(one.untyped_storage().nbytes() == 4 * one.numel() for one in params.values())
    optimizer.bind(params).step({"a": noise(2, 4), "b": noise(3)})


def test_everything_is_on_one_device() -> None:
    optimizer = chain(clip_by_global_norm(1.0), adamw(0.1)).using(executor="reference")
    params = {"a": noise(0, 3), "b": torch.empty(3, device="meta")}
    with pytest.raises(ValueError, match="on cpu and on meta, but a graph is captured on one"):
        optimizer.bind(params, capturable=True)
    bound = optimizer.bind(tree(), capturable=True)
    total = torch.empty((), dtype=torch.float64, device="meta")
    with pytest.raises(ValueError, match="has to be on cpu, got a total on meta"):
        bound.step(gradients()(0), measured=[total])


def test_a_chunk_with_python_s_numbers_refuses_to_be_captured() -> None:
    class OnCuda:
        is_cuda = True

    executor: Any = EXECUTORS["blocked"]
    chunk = Leaf(OnCuda(), OnCuda(), (), (), "p")  # type: ignore[arg-type]  # a tensor there
    with pytest.raises(RuntimeError, match="a CUDA graph is being captured"), Graph().recording():
        executor.bind_chunk((), chunk, ())


def test_measuring_refuses_to_be_captured() -> None:
    optimizer = chain(clip_by_global_norm(1.0), adamw(0.1)).using(executor="blocked")
    params, grads = [noise(0, 3)], [noise(1, 3)]
    state = optimizer.init(params)
    with pytest.raises(RuntimeError, match="a CUDA graph is being captured"), Graph().recording():
        optimizer.measure(params, grads, state)


def test_nothing_is_examined_while_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Binding checks that a chain is pointwise; capturing checks nothing."""
    calls: list[Any] = []
    validate = KernelExecutor.validate
    monkeypatch.setattr(
        KernelExecutor, "validate", lambda *given: (calls.append(given), validate(*given))[1]
    )
    half = tree(torch.float16)  # float16 is not compiled
    bound = sgd(lr=lambda k: 0.1 * 0.99**k, momentum=0.8).bind(half, capturable=True)
    assert calls
    with Graph().recording():
        bound.step(gradients(torch.float16)(0))
