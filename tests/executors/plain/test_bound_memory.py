"""Bound optimizers touch the memory of stepped parameters, and no other memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import State, adamw, muon, sgd, stored
from functional_optim.plan import item_steps

from ...choices import case, pairs
from ..support import Twins, assert_same, copied, noise


def test_a_bind_that_fails_leaves_no_parameter_in_a_buffer() -> None:
    params = {"w": noise(0, 3, 3), "b": noise(1, 3)}
    before = copied(params)
    with pytest.raises(ValueError, match="real matrices"):
        muon(0.1).bind(params)
    wrong = adamw(0.1).init(params)
    wrong.leaves["b"].stages[-1].exp_avg.resize_(())
    with pytest.raises(ValueError, match="shape"):
        adamw(0.1).bind(params, wrong)
    assert_same(params, before)
    assert "one by one" not in adamw(0.1).bind(params).explain()


def test_a_parameter_without_a_gradient_is_not_written(executors: Any) -> None:
    for one in pairs(executor=executors, apart=[False, True]):
        a, b = noise(0, 4), noise(1, 4)
        optimizer = sgd(0.5).using(executor=one["executor"])
        if one["apart"]:  # in buffers of different learning rates
            optimizer = optimizer.override(("b",), lr=0.25)
        bound = optimizer.bind({"a": a, "b": b})
        for grads in ({"a": None, "b": torch.ones(4)}, {"a": None, "b": None}):
            loss = (a * torch.ones(4, requires_grad=True)).sum()
            bound.step(grads)
            with case(**one):
                loss.backward()


def test_an_entry_in_place_of_an_own_gradient_is_the_gradient(executors: Any) -> None:
    for executor in executors:
        bound = sgd(0.5).using(executor=executor).bind({"a": torch.zeros(4), "b": torch.zeros(3)})
        given: dict[str, Any] = bound.gradients
        given["b"].fill_(2.0)
        given["a"] = torch.ones(4)
        bound.step(given)
        with case(executor=executor):
            assert_same(bound.params, {"a": torch.full((4,), -0.5), "b": torch.full((3,), -1.0)})
        given["a"] = None
        bound.step(given)
        with case(executor=executor):
            assert_same(bound.params, {"a": torch.full((4,), -0.5), "b": torch.full((3,), -2.0)})


def test_states_that_are_exchanged_are_exchanged() -> None:
    bound = sgd(0.5, momentum=0.9).bind([noise(0, 4), noise(1, 4)])
    bound.step([noise(2, 4), noise(3, 4)])
    before = copied(bound.state)
    bound.load_state(State(list(reversed(bound.state.leaves))))
    assert_same(list(bound.state.leaves), list(reversed(before.leaves)))


def test_a_state_of_another_shape_is_refused_before_anything_is_written() -> None:
    bound = adamw(0.1).bind([noise(0, 4), noise(1, 4)])
    bound.step([noise(2, 4), noise(3, 4)])
    before, wrong = copied(bound.state), copied(bound.state)
    wrong.leaves[0].step.fill_(7)
    wrong.leaves[1].stages[-1].exp_avg.resize_(())
    with pytest.raises(ValueError, match="'1'"):
        bound.load_state(wrong)
    assert_same(bound.state, before)


def test_a_parameter_without_elements_has_the_state_of_init() -> None:
    optimizer = stored(adamw(0.1), state="int8")
    for shapes in ([(0, 3)], [(0, 3), (300,)]):
        params = [torch.zeros(shape) for shape in shapes]
        bound = optimizer.bind(params, optimizer.init(copied(params)))
        bound.step([torch.ones_like(one) for one in params])
        plain = [torch.zeros(shape) for shape in shapes]
        state = optimizer.init(plain)
        optimizer.update_(plain, [torch.ones_like(one) for one in plain], state)
        with case(shapes=shapes):
            assert_same((list(bound.params), bound.state), (plain, state))


OTHERS: dict[str, Any] = {
    "complex": (torch.complex64, lambda one: one),
    "transposed": (torch.float32, lambda one: one.t().contiguous().t()),
    "expanded": (torch.float32, lambda one: one[:1, :1].expand_as(one)),
}


def test_gradients_of_other_layouts_are_stepped_at_once(
    executors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are copied into the buffers, and no parameter is stepped alone."""
    alone: list[Any] = []
    prepare = item_steps.prepare

    def noted(*given: Any, **options: Any) -> Any:
        alone.append(given)
        return prepare(*given, **options)

    for one in pairs(kind=OTHERS, executor=[one for one in executors if one != "reference"]):
        dtype, change = OTHERS[one["kind"]]

        def made(dtype: torch.dtype = dtype) -> list[Tensor]:
            return [noise(k, 4, 4, dtype=dtype) for k in range(3)]

        twins = Twins(adamw(0.1), made, one["executor"])
        for step in range(3):
            grads = [change(noise(10 * step + k, 4, 4, dtype=dtype)) for k in range(3)]
            kept = copied(grads)
            with monkeypatch.context() as patch:
                patch.setattr(item_steps, "prepare", noted)
                twins.bound.step(grads)
            twins.optimizer.update_(twins.plain, grads, twins.state)
            with case(**one, step=step):
                twins.require_same()
                assert_same(grads, kept)
    assert alone == []
