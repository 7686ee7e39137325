"""State that starts as values of the parameter, compared with ``init`` of two parameters."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from functional_optim import LeafState, Rule, chain, nadam, rprop, schedule_free_adamw, sgd
from functional_optim.core.state import state_tensors
from functional_optim.core.state_init import compute_fields, fields_of, init_leaf, init_like
from functional_optim.core.state_reinit import reinit_state, starts_as_param
from functional_optim.storage import stored
from tests.choices import case
from tests.laws.support import TABLE

SHAPES = [(3, 4), (5,), (), (300,)]
STORED: list[dict[str, Any]] = [{"state": "int8"}, {"param": "bfloat16+master"}]


def same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.view(-1).equal(other.view(-1))


@pytest.mark.parametrize("name", TABLE)
def test_it_is_what_differs(name: str) -> None:
    made = TABLE[name].factory()
    every = [made]
    for options in STORED:
        try:
            every.append(stored(made, **options))
        except (TypeError, ValueError):
            continue
    for optimizer in every:
        stages, hypers = optimizer.stages, tuple(link.hyper for link in optimizer.links)
        is_short = any(one.dtypes == (torch.bfloat16,) for one in stages)
        dtype = torch.bfloat16 if is_short else torch.float32
        for shape in SHAPES:
            nans = torch.full(shape, math.nan, dtype=dtype)
            try:
                with torch.no_grad():
                    one = init_leaf(stages, hypers, nans)
                    other = init_leaf(stages, hypers, torch.ones(shape, dtype=dtype))
            except ValueError:
                continue  # the stage refuses such parameters
            rows = [
                zip(*map(state_tensors, ([a], [b])), strict=True)
                for a, b in zip(one.stages, other.stages, strict=True)
            ]
            want = tuple(tuple(not same(a, b) for a, b in row) for row in rows)
            with case(shape=shape, optimizer=optimizer):
                assert starts_as_param(stages, hypers, shape, dtype) == want


class Hyper(NamedTuple):
    lr: float


class Odd(NamedTuple):
    seen: Tensor
    set_by_item: Tensor
    filled: Tensor
    number: Tensor


def odd_init(param: Tensor, hyper: Hyper) -> Odd:
    by_item = torch.zeros_like(param)
    by_item[0] = param[0]
    seen = torch.full_like(param, 1.0 if float(param.sum()) > 0 else 2.0)
    return Odd(seen, by_item, param.clone().fill_(3.0), torch.full((), hyper.lr))


def test_values_are_followed_through_assignments_and_an_init_that_looks_at_them() -> None:
    def blind_init(param: Tensor, hyper: Hyper) -> Odd:
        made = odd_init(torch.ones(2), hyper)
        by_item = torch.zeros_like(param)
        by_item[0] = param[0]
        return made._replace(
            seen=torch.zeros_like(param), set_by_item=by_item, filled=param.clone().fill_(3.0)
        )

    def step(param: Tensor, grad: Tensor, state: Any, c: Any) -> Any:
        return param, state

    def starts(init: Any) -> Any:
        rule = Rule(name="odd", hyper=Hyper, state=Odd, init=init, rule=step)
        optimizer = chain(rule(lr=0.5))
        hypers = tuple(link.hyper for link in optimizer.links)
        return starts_as_param(optimizer.stages, hypers, (2,), torch.float32)

    assert starts(blind_init) == ((False, True, False, False),)
    assert starts(odd_init) == ((True, True, True, True),)


def test_a_state_without_such_tensors_is_returned_as_it_is() -> None:
    optimizer = TABLE["adamw"].factory()
    hypers = tuple(link.hyper for link in optimizer.links)
    state: LeafState = optimizer.init(torch.ones(3)).leaves
    assert reinit_state(optimizer.stages, hypers, torch.ones(3), state) is state


def test_state_that_begins_with_a_tensor_is_made_anew() -> None:
    """A scheduler can write to the tensor, here or on a device that only torch's tracer has."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        elsewhere: Any = torch.tensor(0.1, device="cuda")
    here: Any = torch.tensor(0.1)
    for rate in (0.1, here, elsewhere):
        links = rprop(lr=rate).links
        stages, hypers = zip(*[(link.stage, link.hyper) for link in links], strict=True)
        made = init_like(stages, hypers, (3,), torch.float32)
        assert [tuple(one.shape) for one in state_tensors(made.stages)] == [(3,), (3,)]
        starts = starts_as_param(stages, hypers, (3,), torch.float32)
        assert starts == ((), (False, isinstance(rate, Tensor)))


def test_fields_follow_the_default_dtype() -> None:
    """A cache for the latest stages must not return the fields of another default dtype."""
    optimizer = nadam()
    hypers = tuple(link.hyper for link in optimizer.links)
    dtypes = []
    for default in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(default)
        try:
            own = fields_of(optimizer.stages, hypers, torch.Size((3,)), torch.float32)[-1]
        finally:
            torch.set_default_dtype(torch.float32)
        dtypes.append({one.name: one.dtype for one in own}["mu_product"])
    assert dtypes == [torch.float32, torch.float64, torch.float32]


def test_fields_of_hyper_parameters_in_a_list_are_not_those_of_the_call_before() -> None:
    shape, dtype = torch.Size((7,)), torch.float32
    heavy, plain = sgd(0.1, momentum=0.5), sgd(0.1)
    stages, hypers = heavy.stages, tuple(link.hyper for link in heavy.links)
    want = compute_fields(stages, hypers, tuple(shape), dtype)
    fields_of(stages, hypers, torch.Size((5,)), dtype)
    listed = [link.hyper for link in plain.links]
    assert fields_of(plain.stages, listed, shape, dtype) != want
    assert fields_of(stages, hypers, shape, dtype) == want


def test_only_tensors_that_start_as_the_parameter_are_created_again() -> None:
    """A stage may have both: Schedule-Free's ``z`` is the parameter, its average starts at 0."""
    optimizer, param = schedule_free_adamw(), torch.ones(3)
    hypers = tuple(link.hyper for link in optimizer.links)
    state = optimizer.init(param).leaves
    found = {name: one for own in state.stages if own for name, one in own._asdict().items()}
    found["exp_avg_sq"].fill_(2.0)
    param.fill_(5.0)
    again = reinit_state(optimizer.stages, hypers, param, state)
    made = {name: one for own in again.stages if own for name, one in own._asdict().items()}
    assert torch.equal(made["z"], torch.full((3,), 5.0))
    assert torch.equal(made["exp_avg_sq"], torch.full((3,), 2.0))
