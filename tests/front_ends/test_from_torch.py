"""Groups, options and names that from_torch returns, and optimizers that it refuses.

The tests in test_runs_go_on.py check that the result continues the run, for all classes and
histories.
"""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import (
    TorchOptimizer,
    as_functional_optim,
    from_torch,
    qhm,
    register_functional_optim,
    sgd,
    to_torch_state_dict,
)
from tests.choices import each

from .runs import Functional
from .support import (
    CASES,
    CLASSES,
    assert_same_entries,
    assert_same_tensors,
    parameters,
    params_of,
    run,
    same_bits,
    set_grads,
    twins,
)


def assert_continued(live: torch.optim.Optimizer) -> None:
    """Check that the next three steps of both optimizers are equal."""
    made = Functional(live)
    for seed in range(50, 53):
        run(live, seed)
        made.step(seed)
        assert_same_tensors(made.params, params_of(live))


@each(name=CASES)
def test_options_that_choose_an_implementation_do_not_count(name: str) -> None:
    cls, options = CASES[name]
    made: Any = cls
    for more in ({}, {"foreach": True}, {"differentiable": False}):
        if not more.keys() <= inspect.signature(cls).parameters.keys():
            continue  # Adafactor has only some of these options
        optimizer = made(parameters(), **options, **more)
        run(optimizer, 0)
        assert from_torch(optimizer).optimizer == as_functional_optim(cls, **options)


@each(name=CASES)
def test_the_parameters_are_the_live_ones_and_nothing_else_is(name: str) -> None:
    optimizer, twin = (twins(name).theirs for _ in range(2))
    for one in (optimizer, twin):
        run(one, 0, 1)
    chain, params, state = from_torch(optimizer)
    live = [leaf for group in params for leaf in group.values()]
    assert all(a is b for a, b in zip(live, params_of(optimizer), strict=True))
    grads = tuple({key: torch.ones_like(p) for key, p in group.items()} for group in params)
    copies = tuple({key: p.detach().clone() for key, p in group.items()} for group in params)
    chain.update_(copies, grads, state)
    for one in (optimizer, twin):
        run(one, 9)
    assert_same_tensors(params_of(optimizer), params_of(twin))
    for number, entries in optimizer.state_dict()["state"].items():
        assert_same_entries(entries, twin.state_dict()["state"][number])


def test_named_parameters_keep_their_names() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.named_parameters(), foreach=False)
    run(optimizer, 0)
    made = from_torch(optimizer)
    assert list(made.params[0]) == [name for name, _ in model.named_parameters()]
    assert_continued(optimizer)


@each(cls=CLASSES, shape=[(), (1,)])
def test_a_tensor_lr_is_taken_as_it_is_now(cls: Any, shape: tuple[int, ...]) -> None:
    optimizer = cls(parameters(), lr=torch.full(shape, 0.1), foreach=False)
    run(optimizer, 0, 1)
    assert_continued(optimizer)
    made = from_torch(optimizer)
    optimizer.param_groups[0]["lr"].fill_(9.0)
    assert same_bits(torch.as_tensor(made.optimizer.hyper["lr"]).reshape(()), torch.tensor(0.1))


@each(second=[{"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9}, {}], stepped=[0, 2])
def test_momentum_in_one_group_only(second: dict[str, Any], stepped: int) -> None:
    params = parameters()
    groups = [{"params": params[:2]}, {"params": params[2:], **second}]
    optimizer = torch.optim.SGD(groups, lr=0.1, foreach=False)
    run(optimizer, *range(stepped), without={3})
    assert_continued(optimizer)


@each(name=["SGD momentum", "SGD"])
def test_momentum_turned_on_or_off_in_mid_run(name: str) -> None:
    # torch keeps the buffer, and does not use it.
    optimizer = twins(name).theirs
    run(optimizer, 0, 1)
    group = optimizer.param_groups[0]
    group["momentum"] = 0.9 - group["momentum"]
    group["dampening"] = 0.5
    assert_continued(optimizer)


def test_options_that_a_scheduler_changed() -> None:
    optimizer = torch.optim.Adam(parameters(), lr=0.1, foreach=False)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9)
    for seed in range(4):
        run(optimizer, seed)
        schedule.step()
    made = from_torch(optimizer)
    assert made.optimizer.hyper["lr"] == optimizer.param_groups[0]["lr"] != 0.1
    assert made.optimizer.hyper["betas"] == optimizer.param_groups[0]["betas"] != (0.9, 0.999)
    assert_continued(optimizer)


def test_an_empty_group_keeps_its_options() -> None:
    optimizer = torch.optim.Adam([{"params": parameters()}, {"params": [], "lr": 0.5}], lr=0.1)
    made = from_torch(optimizer)
    assert made.params[1] == {}
    written = to_torch_state_dict(*made)
    assert [group["lr"] for group in written["param_groups"]] == [0.1, 0.5]
    made.optimizer.bind(made.params, made.state)


def test_groups_that_agree_are_changed_together() -> None:
    # A scheduler computes the lr of each group: equal numbers in different objects.
    params = parameters(shapes=[(2,), (2,)])
    optimizer = torch.optim.SGD([{"params": [param]} for param in params], lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    run(optimizer, 0)
    schedule.step()
    chain, tree, state = from_torch(optimizer)
    grads = tuple({name: torch.ones(2) for name in group} for group in tree)
    stepped, _ = chain.update(tree, grads, state, lr=0.0)
    assert_same_tensors([stepped[0]["0"], stepped[1]["1"]], params)


def test_all_groups_decoupled_are_one_chain_and_some_are_two() -> None:
    params = parameters()
    first = {"params": params[:2], "weight_decay": 0.2, "decoupled_weight_decay": True}
    second = {"params": params[2:], "weight_decay": 0.4, "decoupled_weight_decay": True}
    optimizer = torch.optim.Adam([first, second], lr=0.1, foreach=False)
    run(optimizer, 0)
    assert_continued(optimizer)
    optimizer = torch.optim.Adam([{"params": params[:2]}, second])
    with pytest.raises(ValueError, match=r"group 1 .*two optimizers"):
        from_torch(optimizer)


def test_a_class_of_one_s_own_over_our_optimizer() -> None:
    class QHM(TorchOptimizer):
        def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9, nu: float = 0.7):
            super().__init__(params, qhm(lr, momentum, nu))

    register_functional_optim(QHM, qhm)
    optimizer = QHM([{"params": parameters()[:2]}, {"params": parameters()[2:], "nu": 0.2}])
    run(optimizer, 0, 1, without={1})
    assert_continued(optimizer)


def test_sparse_momentum_buffers() -> None:
    table = torch.nn.Embedding(6, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9, foreach=False)
    table(torch.tensor([1, 4])).sum().backward()
    optimizer.step()
    chain, params, state = from_torch(optimizer)
    stepped, _ = chain.update(params, ({"0": table.weight.grad},), state)
    optimizer.step()
    assert torch.equal(stepped[0]["0"], table.weight)


class Mine(torch.optim.SGD):
    """Subclass whose step may differ from the step of SGD."""


def with_a_name_twice(params: list[Tensor]) -> Any:
    # torch accepts a name twice, but a dict of names has one entry for it.
    return torch.optim.SGD([("w", params[0]), ("w", params[1])], lr=0.1)


def with_a_parameter_twice(params: list[Tensor]) -> Any:
    # torch steps the parameter twice, but a tree of parameters holds each parameter once.
    with pytest.warns(UserWarning, match="duplicate"):
        return torch.optim.SGD([params[0], params[0]], lr=0.1)


class Heavy(torch.optim.SGD):
    """Class whose constructor sets the momentum."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr, momentum=0.9, foreach=False)


def test_an_option_that_the_constructor_lacks_is_not_ignored() -> None:
    register_functional_optim(Heavy, lambda lr=0.1: sgd(lr, momentum=0.9))
    params = parameters()
    optimizer = Heavy([{"params": params[:2], "lr": 0.3}, {"params": params[2:]}])
    run(optimizer, 0)
    assert_continued(optimizer)
    optimizer.param_groups[1]["momentum"] = 0.5
    with pytest.raises(ValueError, match=r"momentum=0\.5, but Heavy has no .* always has 0\.9"):
        from_torch(optimizer)
    adamw = torch.optim.AdamW([{"params": params, "decoupled_weight_decay": False}])
    with pytest.raises(ValueError, match="decoupled_weight_decay=False, but AdamW"):
        from_torch(adamw)


def with_a_part_of_a_state(params: list[Tensor]) -> Any:
    optimizer = torch.optim.Adam([("weight", params[0]), ("bias", params[1])])
    set_grads(params[:2], 0)
    optimizer.step()
    del optimizer.state[params[1]]["exp_avg"]
    return optimizer


@each(
    given=[
        (with_a_name_twice, "w"),
        (with_a_parameter_twice, "twice|duplicate|also at"),
        (with_a_part_of_a_state, r"0\.bias.*exp_avg"),
        (lambda params: TorchOptimizer(params, qhm()), "TorchOptimizer"),
        (Mine, "Mine"),
    ]
)
def test_what_is_refused(given: Any) -> None:
    make, told = given
    with pytest.raises(ValueError, match=told):
        from_torch(make(parameters()))
