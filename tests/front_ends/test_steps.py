"""TorchOptimizer has the bits of torch.optim.X(foreach=False) in parameters and state.

Some tests change options and state by hand between steps.
"""

import collections
import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from functional_optim import (
    TorchOptimizer,
    adam,
    adamw,
    as_functional_optim,
    chain,
    clip_by_global_norm,
    sgd,
)
from functional_optim.remote import DistributedOptimizer
from tests.choices import each

from .support import (
    CASES,
    CLASSES,
    ONE_EACH,
    Params,
    assert_same_params,
    assert_same_tensors,
    assert_same_written,
    grouped,
    noise,
    parameters,
    params_of,
    run,
    set_grads,
    twins,
)


def strided(params: Params) -> Params:
    image = noise(3, 2, 3, 2, 2)
    laid_out = [image.to(memory_format=torch.channels_last), image[0, 0].t(), noise(4, 6, 8)]
    laid_out[2] = laid_out[2][::2, 1::3]
    return [torch.nn.Parameter(one) for one in laid_out]


@contextlib.contextmanager
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@dataclass(frozen=True)
class Scenario:
    """Short run; by default of float32 parameters with a gradient each, in one group."""

    dtype: torch.dtype = torch.float32
    groups: Callable[[str], Callable[[Params], Any]] = lambda name: list
    without: Sequence[Collection[int]] = ((), (), ())
    """For each step, the indices of the parameters without a gradient."""
    lrs: Sequence[float] = ()
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


SCENARIOS = {
    "missing gradients": Scenario(without=({1}, {1, 2}, {0, 1, 2, 3}, {0}, ())),
    "half precision": Scenario(torch.bfloat16),
    "groups": Scenario(groups=grouped, without=({0}, {1}, ())),
    "named groups": Scenario(groups=lambda name: grouped(name, named=True)),
    "strides": Scenario(groups=lambda name: strided),
    "lr before the first step": Scenario(lrs=(0.003, 0.003, 0.003)),
    "lr between steps": Scenario(lrs=(0.1, 0.01, 0.5)),
    "another default dtype": Scenario(without=({0}, {1}, ()), around=double_by_default),
    "without autograd": Scenario(around=torch.no_grad),
}


@each("scenario", scenario=SCENARIOS, name=CASES)
def test_steps_are_those_of_torch_s_class(scenario: str, name: str) -> None:
    made = SCENARIOS[scenario]
    with made.around():
        pair = twins(name, made.dtype, made.groups(name))
        for seed, without in enumerate(made.without):
            if made.lrs:
                pair.each(lambda one, lr=made.lrs[seed]: one.param_groups[0].update(lr=lr))
            pair.step(seed, without=without)
            pair.assert_same()
        assert_same_written(pair.ours.state_dict(), pair.theirs.state_dict())


@each(cls=CLASSES, shape=[(), (1,)])
def test_a_tensor_lr_is_read_in_each_step(cls: Any, shape: tuple[int, ...]) -> None:
    pair = twins((cls, {"lr": torch.full(shape, 0.1)}))
    for one in pair.both:
        one.param_groups[0]["lr"] = torch.full(shape, 0.1)  # both need their own tensor
    for seed in range(2):
        pair.step(seed)
        pair.assert_same()
        # Schedulers write into the tensor.
        pair.each(lambda optimizer: optimizer.param_groups[0]["lr"].mul_(0.5))


@each(name=ONE_EACH)
def test_another_default_device(name: str) -> None:
    # "meta" stands in for an accelerator: tensors made without an explicit device appear there.
    pair = twins(name)
    cls, options = CASES[name]
    with torch.device("meta"):
        ours = TorchOptimizer(params_of(pair.ours), as_functional_optim(cls, **options))
        for seed in range(2):
            with torch.device("cpu"):
                set_grads(params_of(ours), seed, without={seed})
                run(pair.theirs, seed, without={seed})
            ours.step()
        ours.load_state_dict(ours.state_dict())
        ours.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, device="cpu"))]})
    devices = {value.device.type for entry in ours.state.values() for value in entry.values()}
    assert devices == {"cpu"}
    assert_same_tensors(params_of(ours)[:-1], params_of(pair.theirs))


def test_it_is_a_torch_optimizer() -> None:
    optimizer = TorchOptimizer(parameters(), adam(0.1))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.chain.links == adam(0.1).links
    assert optimizer.defaults == dict(adam(0.1).hyper)
    assert optimizer.step() is None
    assert "lr: 0.1" in repr(optimizer)


def test_a_parameter_without_gradient_is_left_alone_with_its_state() -> None:
    optimizer = TorchOptimizer(parameters(), adam(0.1))
    params = params_of(optimizer)
    set_grads(params, 0, without={1})
    versions = [param._version for param in params]
    optimizer.step()
    changed = [p._version != v for p, v in zip(params, versions, strict=True)]
    assert changed == [True, False, True, True]
    assert [int(optimizer.state[p]["step"]) for p in params] == [1, 0, 1, 1]


@each(name=["SGD momentum", "AdamW", "Adagrad", "Rprop"])
def test_one_parameter_twice_in_a_group_is_stepped_once(name: str) -> None:
    """torch warns, and steps the parameter twice. TorchOptimizer warns, and steps it once."""
    cls, options = CASES[name]
    (one, two), once = parameters()[:2], parameters()[:2]
    optimizer = as_functional_optim(cls, **options)
    with pytest.warns(UserWarning, match="duplicate"):
        doubled = TorchOptimizer([one, two, one], optimizer)
    plain = TorchOptimizer(once, optimizer)
    for seed in range(3):
        for params, stepped in (((one, two), doubled), (once, plain)):
            set_grads(params, seed)
            stepped.step()
    assert_same_tensors([one, two], once)
    assert int(doubled.state[one]["step"]) == 3


@each(named=[False, True])
def test_one_parameter_in_two_groups_is_refused_between_steps(named: bool) -> None:
    """A step would use the options of one group only. The error names both places."""
    params = parameters()[:3]
    groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "lr": 0.5}]
    if named:
        groups = [{**one, "params": [("x", p) for p in one["params"]]} for one in groups]
        groups[1]["params"] = [("y", params[1]), ("z", params[2])]
    optimizer = TorchOptimizer(groups, as_functional_optim(torch.optim.SGD, lr=0.1))
    set_grads(params, 0)
    optimizer.step()
    before = [param.detach().clone() for param in params]
    replaced = optimizer.param_groups[1]["params"]
    replaced[1] = params[0]  # the groups have as many parameters as in the planned step
    label = "'z'.*'x'" if named else r"'param_groups\[1\]\[1\]'.*'param_groups\[0\]\[0\]'"
    with pytest.raises(ValueError, match=f"{label}.*remove it from the other group"):
        optimizer.step()
    assert_same_tensors(params, before)
    del optimizer.param_groups[0]["params"][0]  # now the parameter has moved
    if named:
        del optimizer.param_groups[0]["param_names"][0]
    optimizer.step()
    assert torch.equal(params[0], before[0] - 0.5 * params[0].grad)


def test_a_group_with_more_parameters_than_names_is_named() -> None:
    """A parameter that is put into the list of a group with names needs a name there."""
    params = parameters()[:3]
    optimizer = TorchOptimizer([("x", params[0]), ("y", params[1])], sgd(lr=0.1))
    optimizer.param_groups[0]["params"].append(params[2])
    set_grads(params, 0)
    before = [param.detach().clone() for param in params]
    with pytest.raises(ValueError, match="3 parameters under 'params', and 2 names under"):
        optimizer.step()
    assert_same_tensors(params, before)
    optimizer.param_groups[0]["param_names"].append("z")
    optimizer.step()
    assert torch.equal(params[2], before[2] - 0.1 * params[2].grad)


def test_frozen_parameters_join_when_they_are_thawed() -> None:
    pair = twins("Adam")
    pair.each(lambda one: params_of(one)[1].requires_grad_(requires_grad=False))
    pair.step(0, without={1})
    pair.each(lambda one: params_of(one)[1].requires_grad_())
    pair.step(1)
    pair.assert_same()


def test_a_chain_clips_over_all_groups_at_once() -> None:
    def groups() -> Any:
        params = parameters()
        return [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.5}]

    optimizer = chain(clip_by_global_norm(1.0), sgd(0.1, momentum=0.9))
    ours = TorchOptimizer(groups(), optimizer)
    theirs = torch.optim.SGD(groups(), lr=0.1, momentum=0.9, foreach=False)
    for seed in range(3):
        run(ours, seed, without={2})
        set_grads(params_of(theirs), seed, without={2})
        grads = [p.grad for p in params_of(theirs) if p.grad is not None]
        norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()
        assert norm > 1.0
        for grad in grads:
            grad.mul_((1.0 / (norm + 1e-6)).to(grad.dtype))
        theirs.step()
        torch.testing.assert_close(params_of(ours), params_of(theirs), rtol=1e-6, atol=1e-7)


def test_a_second_optimizer_over_the_same_parameters() -> None:
    params, twin = parameters(), parameters()
    ours = [TorchOptimizer(params, adam(lr)) for lr in (0.1, 0.2)]
    theirs = [torch.optim.Adam(twin, lr, foreach=False) for lr in (0.1, 0.2)]
    for seed in range(3):
        for optimizer in (*ours, *theirs):
            run(optimizer, seed)
    assert_same_params(ours[0], theirs[0])


def test_a_group_added_later_is_stepped() -> None:
    mine, theirs = parameters(), parameters()
    ours = TorchOptimizer(mine[:2], adam(0.1))
    torchs = torch.optim.Adam(theirs[:2], 0.1, foreach=False)
    for seed, start in enumerate([2, 3]):
        for params, optimizer in ((mine, ours), (theirs, torchs)):
            optimizer.add_param_group({"params": iter(params[start : start + 1]), "lr": 0.5})
            set_grads(params, seed)
            optimizer.step()
    assert_same_tensors(mine, theirs)


def test_the_caller_s_group_is_left_as_it_is() -> None:
    params = parameters()
    group = {"params": params, "lr": 0.5}
    optimizer = TorchOptimizer([group], adam(0.1))
    assert group == {"params": params, "lr": 0.5}
    optimizer.param_groups[0]["lr"] = 0.1
    assert group["lr"] == 0.5


def test_a_list_that_is_changed_in_place_is_seen() -> None:
    pair = twins("Adam")
    pair.each(lambda optimizer: optimizer.param_groups[0].update(betas=[0.6, 0.7]))
    for seed, beta in enumerate([0.6, 0.1, 0.1, 0.9]):
        pair.each(lambda one, beta=beta: one.param_groups[0]["betas"].__setitem__(0, beta))
        pair.step(seed)
        pair.assert_same()


RESTARTS: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda optimizer: setattr(optimizer, "state", collections.defaultdict(dict)),
    lambda optimizer: optimizer.state.clear(),
    lambda optimizer: optimizer.state.pop(params_of(optimizer)[0]),
]


@each(name=["SGD momentum", "Adam", "RMSprop centered", "Rprop"])
def test_a_restart_by_clearing_the_state(name: str) -> None:
    pair = twins(name)
    for seed, restart in enumerate(RESTARTS):
        pair.step(2 * seed)
        pair.each(restart)
        pair.step(2 * seed + 1)
        pair.assert_same()


def test_momentum_turned_on_and_off_again() -> None:
    pair = twins("SGD")
    for seed, momentum in enumerate([0.0, 0.9, 0.9, 0.5, 0.0, 0.0]):
        pair.each(lambda one, m=momentum: one.param_groups[0].update(momentum=m, dampening=0.3))
        pair.step(seed)
        assert_same_params(pair.ours, pair.theirs)


def test_a_first_gradient_of_negative_zeros() -> None:
    pair = twins("SGD momentum")
    for optimizer in pair.both:
        for param in params_of(optimizer):
            param.data.fill_(-0.0)
            param.grad = torch.full_like(param, -0.0)
        optimizer.step()
    pair.assert_same()


@each(name=["Rprop", "AdamW", "SGD momentum"], steps=[1, 4])
def test_state_that_is_zeroed_where_it_lies_is_stepped_as_torch_s_class_steps_it(
    name: str, steps: int
) -> None:
    """The step count restarts, and the other fields continue from zero, in planned steps too."""
    pair = twins(name)
    for seed in range(steps + 3):
        if seed == steps:
            for optimizer in pair.both:
                for entries in optimizer.state.values():
                    for value in entries.values():
                        value.zero_()
        for optimizer in pair.both:
            run(optimizer, seed)
    pair.assert_same()


def test_it_is_not_taken_for_a_wrapper() -> None:
    """Fault 17: libraries take an object with ``.optimizer`` for a wrapper of an optimizer.

    So our subclasses of torch.optim.Optimizer have no such attribute.
    """
    weight = torch.ones(1, requires_grad=True)
    optimizer = TorchOptimizer([weight], adam(0.1))
    assert optimizer.chain == adam(0.1)
    placed = DistributedOptimizer.over_threads(adam(0.1), [("weight", weight)], {"weight": "one"})
    for one in (optimizer, placed):
        assert isinstance(one, torch.optim.Optimizer)
        assert not hasattr(one, "optimizer")
    placed.close()


def test_the_state_of_a_parameter_without_a_gradient_is_not_looked_at() -> None:
    """As in torch.optim, such state may hold anything, in planned steps too."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = TorchOptimizer(params, adamw(lr=0.1))
    for step in range(4):
        params[0].grad = torch.full((3,), float(step + 1))
        if step == 1:
            del optimizer.state[params[1]]
        if step == 3:
            optimizer.state[params[1]] = {"exp_avg": "no tensor"}
        optimizer.step()
        assert len(optimizer.state[params[1]]) == (3, 0, 0, 1)[step]
    assert torch.equal(params[1], torch.ones(3))
    assert int(optimizer.state[params[0]]["step"]) == 4
