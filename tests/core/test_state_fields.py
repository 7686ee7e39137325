"""The state, one field at a time: what is read is what is there, and can be put back."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    Rule,
    State,
    accumulate,
    adam,
    adamw,
    chain,
    clip_by_global_norm,
    sgd,
    state_field,
    stored,
    with_state_field,
)
from functional_optim.core import initial
from functional_optim.core.aliasing import storage_of
from functional_optim.core.links import state_names
from functional_optim.core.torch_state import to_entries
from functional_optim.plan.composed.one_step import step_leaves
from functional_optim.plan.items import items_of
from functional_optim.testing import ANY_SHAPE, CHAINS
from functional_optim.testing.compare import snapshot, tensors_in
from tests.choices import case

from .support import EVERY, assert_same, noise, steps

EVERYTHING: dict[str, Optimizer] = {
    **{
        f"{name} by default": one.factory()
        for name, one in {**ANY_SHAPE, **CHAINS}.items()
        if all(link.where is None for link in one.factory().links)  # see tests/composition
    },
    **EVERY,
    "momentum twice": chain(sgd(0.1, momentum=0.9).links[-1], sgd(0.1, momentum=0.5)),
    "stored": stored(adamw(0.1), state={"exp_avg": "int8", "*": "bfloat16"}),
}
PARAMS = {
    "w": noise(0, 2, 3, dtype=torch.float32),
    "n": None,
    "b": [noise(1, 4, dtype=torch.float32)],
}


def grads(step: int) -> Any:
    made = {"w": noise(step + 5, 2, 3, dtype=torch.float32), "n": None, "b": [None]}
    return made if step else {**made, "b": [noise(9, 4, dtype=torch.float32)]}


def names_of(optimizer: Optimizer) -> list[str]:
    return ["step", *(name for own in state_names(optimizer.stages) for name in own)]


def leaves_of(found: Any) -> list[Any]:
    assert list(found) == ["w", "n", "b"] and found["n"] is None and len(found["b"]) == 1
    return [found["w"], found["b"][0]]


def test_what_is_read_and_written_back_is_the_same_state() -> None:
    """Every field of every algorithm; each is found, and under the names that checkpoints have."""
    for name, optimizer in EVERYTHING.items():
        _, state = steps(optimizer, PARAMS, grads, 2)
        read: list[set[int]] = [set(), set()]
        entries = [
            to_entries(optimizer.stages, optimizer.hypers_at(path), param, leaf)
            for path, param, leaf in (
                (("w",), PARAMS["w"], state.leaves["w"]),
                (("b", 0), PARAMS["b"][0], state.leaves["b"][0]),
            )
        ]
        for field in names_of(optimizer):
            with case(name=name, field=field):
                found = state_field(optimizer, state, field)
                for own, tensor, ids in zip(entries, leaves_of(found), read, strict=True):
                    assert own.get(field) is tensor
                    ids.update({id(tensor)} - {id(None)})
                again = with_state_field(optimizer, state, field, found)
                assert type(again) is State
                assert_same(again, state)
        for leaf, ids in zip(leaves_of(state.leaves), read, strict=True):
            assert {id(one) for one in tensors_in(leaf)} == ids


def test_what_is_written_is_read_and_nothing_else_changes() -> None:
    """In memory of its own; what was given stays as it was."""
    for name, optimizer in EVERYTHING.items():
        _, state = steps(optimizer, PARAMS, grads, 2)
        before = snapshot(state)
        for field in names_of(optimizer):
            found = state_field(optimizer, state, field)
            wanted = {
                "w": None if found["w"] is None else found["w"] + 1,
                "n": None,
                "b": [None if found["b"][0] is None else found["b"][0] + 1],
            }
            kept = snapshot(wanted)
            with case(name=name, field=field):
                made = with_state_field(optimizer, state, field, wanted)
                assert_same(state_field(optimizer, made, field), kept)
                for other in names_of(optimizer):
                    if other != field:
                        assert_same(
                            state_field(optimizer, made, other),
                            state_field(optimizer, state, other),
                        )
                given = {storage_of(one) for one in tensors_in((wanted, state))}
                new = tensors_in(state_field(optimizer, made, field))
                assert not given & {storage_of(one) for one in new}
                assert len({storage_of(one) for one in new}) == len(new)
                for one in tensors_in(made):
                    one.zero_()
                assert_same(wanted, kept)
            _, state = steps(optimizer, PARAMS, grads, 2)
        assert_same(state, before)


def test_the_next_step_takes_what_was_written() -> None:
    optimizer = adam(0.1)
    params, state = {"w": torch.ones(2)}, adam(0.1).init({"w": torch.ones(2)})
    state = with_state_field(optimizer, state, "step", {"w": torch.tensor(9)})
    state = with_state_field(optimizer, state, "exp_avg", {"w": torch.full((2,), 0.5)})
    for executor in ("reference", "blocked"):
        new, after = optimizer.using(executor=executor).update(params, {"w": torch.zeros(2)}, state)
        assert int(after.leaves["w"].step) == 10
        assert after.leaves["w"].stages[-1].exp_avg.tolist() == pytest.approx([0.45, 0.45])
        assert not torch.equal(new["w"], params["w"])


def test_it_lies_in_memory_as_what_it_replaces() -> None:
    """Kernels round by layout in 16 bits; and what overlaps itself cannot be stepped in place."""
    optimizer, param = adam(0.1), noise(0, 3, 4).t()
    state = optimizer.init(param)
    for given in (torch.ones(4, 3), torch.ones(3, 4).t(), torch.ones(1).expand(4, 3)):
        made = with_state_field(optimizer, state, "exp_avg", given.double())
        assert made.leaves.stages[-1].exp_avg.stride() == (1, 4)
        assert_same(made.leaves.stages[-1].exp_avg.contiguous(), torch.ones(4, 3).double())


def test_derivatives_and_populations_go_through_it() -> None:
    optimizer, param = sgd(0.1, momentum=0.5), torch.ones(2, dtype=torch.float64)
    state = optimizer.init(param)

    def after(buffer: Tensor) -> Tensor:
        made = with_state_field(optimizer, state, "momentum_buffer", buffer)
        made = with_state_field(optimizer, made, "step", state_field(optimizer, made, "step") + 1)
        return optimizer.update(param, torch.ones_like(param), made)[0]

    slope = torch.func.jacrev(after)(torch.zeros_like(param))
    assert torch.equal(slope, torch.diag(torch.full((2,), -0.05, dtype=torch.float64)))
    several = torch.func.vmap(after)(torch.arange(6, dtype=torch.float64).reshape(3, 2))
    for row, buffer in zip(
        several, torch.arange(6, dtype=torch.float64).reshape(3, 2), strict=True
    ):
        assert_same(row, after(buffer))


class SidesState(NamedTuple):
    sides: list[Tensor]  # one for each dimension
    mean: Tensor


class SidesHyper(NamedTuple):
    lr: float


def sides_init(param: Tensor, hyper: Any) -> SidesState:
    return SidesState([param.new_zeros(size) for size in param.shape], torch.zeros_like(param))


def sides_rule(param: Tensor, grad: Tensor, state: SidesState, c: Any) -> tuple[Tensor, SidesState]:
    return param - c.lr * grad, state


SIDES = Rule(
    name="sides",
    hyper=SidesHyper,
    state=SidesState,
    init=sides_init,
    rule=sides_rule,
    kind="per_matrix",
)


def test_of_several_tensors_each_has_a_name() -> None:
    optimizer = chain(SIDES(lr=0.1))
    params = {"m": torch.ones(2, 3), "v": torch.ones(4), "s": torch.ones(())}
    state = optimizer.init(params)
    first, second = (state_field(optimizer, state, f"sides[{i}]") for i in (0, 1))
    assert [first["m"].numel(), first["v"].numel(), first["s"]] == [2, 4, None]
    assert [second["m"].numel(), second["v"], second["s"]] == [3, None, None]
    made = with_state_field(optimizer, state, "sides[1]", {**second, "m": torch.ones(3)})
    assert [one.tolist() for one in made.leaves["m"].stages[0].sides] == [[0, 0], [1, 1, 1]]
    with pytest.raises(ValueError, match=r"'m' is 2 tensors; name one .*: sides\[0\], sides\[1\]"):
        state_field(optimizer, state, "sides")
    with pytest.raises(
        ValueError, match=r"mean\[0\] at 'm': the field is one tensor.*name it mean"
    ):
        state_field(optimizer, state, "mean[0]")


OPTIMIZER = adam(0.1)
STATE = OPTIMIZER.init({"w": torch.ones(2), "b": None})
REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("exp_av", {"w": None, "b": None}, ValueError, "'exp_av'; its state has step, exp_avg, exp"),
    ("adam.exp_avg", {"w": None, "b": None}, ValueError, "no field of state 'adam.exp_avg'"),
    ("exp_avg", {"w": torch.ones(3), "b": None}, ValueError, r"at 'w' has shape \(3,\), and must"),
    ("exp_avg", {"w": torch.ones(2).double(), "b": None}, ValueError, "dtype torch.float64"),
    ("exp_avg", {"w": torch.ones(2, device="meta"), "b": None}, ValueError, "has device meta"),
    ("exp_avg", {"w": torch.ones(2).to_sparse(), "b": None}, ValueError, "layout torch.sparse"),
    ("exp_avg", {"w": [1.0, 2.0], "b": None}, TypeError, "must be a tensor or None"),
    ("exp_avg", {"w": None, "b": None}, ValueError, "'w' is None, and the leaf has such a tensor"),
    ("exp_avg", {"w": torch.ones(2), "b": torch.ones(2)}, ValueError, "'b': the leaf has no such"),
    ("max_exp_avg_sq", {"w": torch.ones(2), "b": None}, ValueError, "'w': the leaf has no such"),
    ("exp_avg", {"w": torch.ones(2)}, ValueError, "no exp_avg at 'b'"),
    ("step", {"w": torch.tensor(-1), "b": None}, ValueError, "'w' must be .*>= 0, got -1"),
    ("step", {"w": torch.tensor(1.0), "b": None}, ValueError, "dtype torch.float32"),
]


def test_what_cannot_stand_there_is_refused() -> None:
    before = snapshot(STATE)
    for name, given, error, message in REFUSED:
        with case(message=message), pytest.raises(error, match=message):
            with_state_field(OPTIMIZER, STATE, name, given)
    assert_same(STATE, before)
    plain = chain(clip_by_global_norm(1.0), sgd(0.1))
    with pytest.raises(ValueError, match="no field of state 'exp_avg'; its state has step, mom"):
        state_field(plain, plain.init(torch.ones(1)), "exp_avg")
    with pytest.raises(ValueError, match="at 'w' is of another optimizer than maximize, .*, sgd"):
        state_field(sgd(0.1, momentum=0.9), STATE, "momentum_buffer")
    with pytest.raises(TypeError, match="state must be the State that init or update"):
        state_field(OPTIMIZER, STATE.leaves, "exp_avg")
    with pytest.raises(ValueError, match="no field of state 3"):
        state_field(OPTIMIZER, STATE, 3)  # type: ignore[arg-type]


def test_a_tracer_finds_out_once_about_leaves_that_are_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a tree with many leaves, this would otherwise be a fifth of what is traced."""
    asked: list[Any] = []
    before = initial.fields_of_any

    def noted(*of: Any) -> Any:
        asked.append(of[2])
        return before(*of[:4])

    monkeypatch.setattr(initial, "_kept_fields", noted)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for optimizer in (adamw(), chain(accumulate(2), adamw())):
        params = [torch.ones(size) for size in (2, 3, 2, 3, 2)]
        state = optimizer.init(params)
        asked.clear()
        if optimizer.is_composed:
            step_leaves(optimizer, params, params, state)
        else:
            items_of(optimizer, params, params, state)
        assert asked == [(2,), (3,)]
