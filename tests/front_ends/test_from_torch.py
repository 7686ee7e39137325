"""from_torch: a live torch.optim optimizer is continued here, bit for bit."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import as_functional_optim, from_torch, to_torch_state_dict
from functional_optim.torch_interop import FromTorch

from .support import (
    CASES,
    CLASSES,
    Case,
    assert_same_entries,
    assert_same_tensors,
    parameters,
    params_of,
    same_bits,
    set_grads,
)

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def live(case: Case, params: Any, **more: Any) -> torch.optim.Optimizer:
    cls, options = case
    return cls(params, foreach=False, **options, **more)


def run(optimizer: torch.optim.Optimizer, seeds: Sequence[int], without: Any = ()) -> None:
    for seed in seeds:
        set_grads(params_of(optimizer), seed, without)
        optimizer.step()


def leaves(tree: Any) -> list[Tensor]:
    """Parameters in torch's order: groups are dicts, in the order of insertion."""
    return [leaf for group in tree for leaf in group.values()]


def grads_like(made: FromTorch, optimizer: torch.optim.Optimizer) -> Any:
    found = iter([param.grad for param in params_of(optimizer)])
    return tuple({name: next(found) for name in group} for group in made.params)


def assert_continued(
    optimizer: torch.optim.Optimizer, made: FromTorch | None = None, without: Any = ()
) -> None:
    """The next three steps of ``made`` are those of the instance: parameters and state."""
    made = from_torch(optimizer) if made is None else made
    chain, params, state = made
    for seed in range(50, 53):
        set_grads(params_of(optimizer), seed, without)
        params, state = chain.update(params, grads_like(made, optimizer), state)
        optimizer.step()
        assert_same_tensors(leaves(params), params_of(optimizer))
    got = to_torch_state_dict(chain, params, state, type(optimizer))["state"]
    want = optimizer.state_dict()["state"]
    for number, entries in want.items():
        assert_same_entries(got[number], entries)


@every_case
def test_before_the_first_step(case: Case) -> None:
    assert_continued(live(case, parameters(1)))


@every_case
def test_in_mid_run(case: Case) -> None:
    optimizer = live(case, parameters(1))
    run(optimizer, range(4))
    assert_continued(optimizer)


@every_case
def test_with_parameters_that_never_got_a_gradient(case: Case) -> None:
    optimizer = live(case, parameters(1))
    run(optimizer, range(3), without={1, 3})
    assert_continued(optimizer, without={3})


@every_case
def test_with_parameters_at_different_steps(case: Case) -> None:
    optimizer = live(case, parameters(1))
    run(optimizer, [0, 1], without={0})
    run(optimizer, [2])
    run(optimizer, [3], without={2})
    assert_continued(optimizer)


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(case: Case, dtype: torch.dtype) -> None:
    optimizer = live(case, parameters(1, dtype))
    run(optimizer, range(3), without={1})
    assert_continued(optimizer)


@every_case
def test_named_parameters_keep_their_names(case: Case) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    optimizer = live(case, model.named_parameters())
    run(optimizer, range(2))
    made = from_torch(optimizer)
    assert list(made.params[0]) == [name for name, _ in model.named_parameters()]
    assert_continued(optimizer, made)


@every_case
def test_more_than_ten_parameters_keep_their_order(case: Case) -> None:
    optimizer = live(case, parameters(1, shapes=[(k,) for k in range(1, 13)]))
    run(optimizer, range(2), without={2, 11})
    assert_continued(optimizer)


@every_case
def test_strides_are_kept(case: Case) -> None:
    image = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    last = torch.nn.Parameter(image.to(memory_format=torch.channels_last))
    turned = torch.nn.Parameter(image[0, 0].t())
    optimizer = live(case, [last, turned])
    run(optimizer, range(2))
    made = from_torch(optimizer)
    params, _ = made.optimizer.update(made.params, grads_like(made, optimizer), made.state)
    assert [leaf.stride() for leaf in leaves(params)] == [last.stride(), turned.stride()]
    assert_continued(optimizer, made)


@every_case
def test_options_that_choose_an_implementation(case: Case) -> None:
    cls, options = case
    for more in ({}, {"foreach": True}, {"differentiable": False}):
        optimizer = cls(parameters(1), **options, **more)
        run(optimizer, range(2))
        made = from_torch(optimizer)
        assert made.optimizer == as_functional_optim(cls, **options)


@every_case
def test_the_instance_is_not_disturbed(case: Case) -> None:
    optimizer, twin = live(case, parameters(1)), live(case, parameters(1))
    for one in (optimizer, twin):
        run(one, range(3))
    chain, params, state = from_torch(optimizer)
    grads = tuple({name: torch.ones_like(p) for name, p in group.items()} for group in params)
    copies = tuple({name: p.detach().clone() for name, p in group.items()} for group in params)
    chain.update_(copies, grads, state)
    assert_same_tensors(params_of(optimizer), params_of(twin))
    for one in (optimizer, twin):
        run(one, [9])
    assert_same_tensors(params_of(optimizer), params_of(twin))
    for number, entries in optimizer.state_dict()["state"].items():
        assert_same_entries(entries, twin.state_dict()["state"][number])


@every_case
def test_the_parameters_are_the_live_ones(case: Case) -> None:
    optimizer = live(case, parameters(1))
    made = from_torch(optimizer)
    assert all(a is b for a, b in zip(leaves(made.params), params_of(optimizer), strict=True))


@pytest.mark.parametrize("cls", CLASSES)
def test_frozen_and_0_element_parameters(cls: type[torch.optim.Optimizer]) -> None:
    params = parameters(1, shapes=[(2,), (0, 3), ()])
    params[0].requires_grad_(requires_grad=False)
    optimizer = live((cls, {}), params)
    run(optimizer, range(2), without={0})
    assert_continued(optimizer, without={0})


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_lr(cls: type[torch.optim.Optimizer], shape: tuple[int, ...]) -> None:
    optimizer = live((cls, {"lr": torch.full(shape, 0.1)}), parameters(1))
    run(optimizer, range(3))
    assert_continued(optimizer)


def test_a_tensor_lr_is_taken_as_it_is_now() -> None:
    lr = torch.tensor(0.1)
    made = from_torch(torch.optim.Adam(parameters(1), lr=lr))
    lr.fill_(9.0)
    assert same_bits(torch.as_tensor(made.optimizer.hyper["lr"]), torch.tensor(0.1))
