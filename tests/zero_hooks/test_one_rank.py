"""Tests on one rank of hooks with schedulers, scalers and modules that are wrapped again."""

import copy
import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from functional_optim import adamw, chain, clip_by_global_norm, sgd
from hooks import (
    OptimizerState,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    step_hook,
    zero_step_hook,
)
from hooks.step_hook import build_hook
from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld

from .cases import UNUSED

HOOKS: dict[str, Callable[..., Any]] = {
    "scatter": zero_step_hook,
    "held": functools.partial(hook_with_zero_step, allreduce_hook),
    "interleaved": functools.partial(hook_with_zero_step_interleaved, allreduce_hook),
}


def made(kind: str, module: nn.Module, optimizer: Any = torch.optim.SGD, **more: Any) -> Any:
    """Return a module under DDP, its optimizer, and its hook."""
    group = LocalWorld(1).groups[0]
    ddp = DistributedDataParallel(module, process_group=group, bucket_cap_mb=1e-4, **UNUSED)
    views = more.pop("parameters_as_bucket_view", False)
    params = list(module.named_parameters())
    zero = ZeroRedundancyOptimizer(params, optimizer, group, views, overlap_with_ddp=True, lr=0.5)
    hook = HOOKS[kind](ddp, zero, **more)
    ddp.register_comm_hook(group, hook)
    return ddp, zero, hook


@pytest.mark.parametrize("kind", HOOKS)
def test_step_does_nothing_after_a_hook_and_is_an_error_before(kind: str) -> None:
    ddp, zero, _ = made(kind, nn.Linear(2, 1))
    with pytest.raises(RuntimeError, match="nothing was stepped"):
        zero.step()
    ddp(torch.ones(1, 2)).sum().backward()
    before = ddp.module.weight.detach().clone()
    assert zero.step() is None
    assert torch.equal(ddp.module.weight, before)


each_kind = pytest.mark.parametrize("kind", HOOKS)


def loss(module: nn.Module) -> torch.Tensor:
    """Return the loss of one row of ones."""
    found: torch.Tensor = module(torch.ones(1, 3)).sum()
    return found


class Halves(nn.Module):
    """Model with a used and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 1)
        self.unused = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.used(x)
        return found


@each_kind
def test_a_scheduler_sees_that_the_optimizer_steps(kind: str) -> None:
    """A scheduler does not warn that ``optimizer.step()`` was never called; warnings are errors
    here.
    """
    ddp, zero, _ = made(kind, Halves())
    scheduler = torch.optim.lr_scheduler.StepLR(zero, 1, gamma=0.5)
    loss(ddp).backward()
    scheduler.step()
    assert zero.param_groups[0]["lr"] == 0.25


@each_kind
def test_a_scaler_that_the_hook_does_not_know(kind: str) -> None:
    ddp, zero, _ = made(kind, Halves())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(loss(ddp)).backward()
    with pytest.raises(RuntimeError, match="give the hook grad_scaler="):
        scaler.step(zero)


@each_kind
def test_a_scaler_that_it_knows(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    ddp, zero, _ = made(kind, Halves(), grad_scaler=scaler)
    with torch.no_grad():
        ddp.module.used.bias.fill_(1.0)
    scaler.scale(loss(ddp)).backward()
    scaler.step(zero)
    scaler.update()
    assert ddp.module.used.bias.item() == 0.5
    assert caplog.text == ""  # the scaler's call of step() logs no warning


@each_kind
def test_a_module_that_is_wrapped_again(kind: str) -> None:
    """A module that is wrapped again keeps no hook and no optimizer of an earlier wrapping."""
    module = Halves()
    seen = []
    for _ in range(3):
        ddp, zero, _ = made(kind, module, adamw())
        for _ in range(2):
            loss(ddp).backward()
            ddp.zero_grad()
        seen.append(weakref.ref(zero))
        del ddp, zero
    gc.collect()
    deadline = time.monotonic() + 120.0
    # The hook's thread releases the optimizer and the gradient hooks a little later.
    while any(one() is not None for one in seen) or any(
        k._backward_hooks for k in module.parameters()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)
        gc.collect()
    assert [one() for one in seen] == [None] * 3
    for part in module.modules():
        assert not part._forward_pre_hooks and not part._state_dict_pre_hooks
    for param in module.parameters():
        assert not param._backward_hooks


@each_kind
def test_another_default_device(kind: str) -> None:
    """Tensors that belong on the CPU are created there under any default device of torch."""
    optimizer = chain(clip_by_global_norm(1.0), adamw())
    x = torch.ones(1, 3)
    ddp, _, _ = made(kind, Halves(), optimizer, max_norm=1.0)
    before = ddp.module.used.bias.item()
    with torch.device("meta"):
        for _ in range(2):
            ddp(x).sum().backward()
            ddp.zero_grad()
    assert ddp.module.used.bias.item() != before


class Failing(torch.autograd.Function):
    """User function that fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise ValueError("of the user")


class Fails(nn.Module):
    """Model whose backward can fail halfway."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 40)
        self.last = nn.Linear(40, 40)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.first(x)
        found: torch.Tensor = self.last(Failing.apply(seen) if self.fails else seen)
        return found


@pytest.mark.parametrize("kind", ["scatter", "interleaved"])
def test_what_a_failed_backward_leaves_under_way_is_waited_for(kind: str) -> None:
    """``hook.wait`` waits for steps that a failed backward left pending.

    Otherwise a late step could overwrite a checkpoint that was loaded meanwhile.
    """
    ddp, zero, hook = made(kind, Fails())
    loss(ddp).backward()  # later backward passes have several buckets
    ddp.zero_grad()
    ddp.module.fails = True
    go_on, made_steps, step = threading.Event(), [], zero.step_owned

    def late(*given: Any, **more: Any) -> None:
        assert go_on.wait(120.0)
        step(*given, **more)
        made_steps.append(sorted(given[0]))

    with mock.patch.object(zero, "step_owned", late):
        with pytest.raises(ValueError, match="of the user"):
            loss(ddp).backward()
        threading.Timer(0.05, go_on.set).start()
        hook.wait()
        assert made_steps  # the buckets before the failure


@each_kind
def test_a_parameter_in_other_memory_is_stepped_there(kind: str) -> None:
    """A parameter whose memory is replaced is stepped in its new memory."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    twin = copy.deepcopy(module)
    ddp, _, hook = made(kind, module, torch.optim.Adam)
    alone = torch.optim.Adam(twin.parameters(), lr=0.5, foreach=False)
    for number in range(8):
        left = module[0].weight.data
        if number in {4, 6}:
            module[0].weight.data = left.clone()
        loss(ddp).backward()
        hook.wait()
        loss(twin).backward()
        alone.step()
        if number in {4, 6}:
            assert not torch.equal(module[0].weight, left)
        for param, wanted in zip(module.parameters(), twin.parameters(), strict=True):
            assert torch.equal(param, wanted)
        ddp.zero_grad()
        alone.zero_grad()


def test_a_parameter_that_has_left_its_buffer_is_named() -> None:
    module = nn.Linear(3, 1)
    ddp, _, _ = made("scatter", module, parameters_as_bucket_view=True)
    for _ in range(3):
        loss(ddp).backward()
        ddp.zero_grad()
    module.weight.data = module.weight.data.clone()
    with pytest.raises(RuntimeError, match="the parameter 'weight' is not what it was"):
        loss(ddp).backward()


@each_kind
def test_an_option_that_asks_for_state_once_buckets_are_prepared(kind: str) -> None:
    """A bucket that is prepared already finds state that an option adds later."""
    module = nn.Linear(3, 2)
    twin = copy.deepcopy(module)
    ddp, zero, hook = made(kind, module)
    alone = torch.optim.SGD(twin.parameters(), lr=0.5, foreach=False)
    for number in range(7):
        for group in (zero.param_groups[0], alone.param_groups[0]):
            group.update(momentum=0.9 if number > 3 else 0.0, lr=0.5 / (1 + number))
        loss(ddp).backward()
        hook.wait()
        loss(twin).backward()
        alone.step()
        for param, wanted in zip(module.parameters(), twin.parameters(), strict=True):
            assert torch.equal(param, wanted)
        ddp.zero_grad()
        alone.zero_grad()


@pytest.mark.parametrize(
    "make_hook", [hook_with_zero_step, hook_with_zero_step_interleaved, step_hook]
)
def test_in_order_a_bucket_is_waited_for_before_the_next_one(make_hook: Any) -> None:
    """A ZeRO hook waited for each bucket at once, so that backward did not go on meanwhile."""
    module = nn.Sequential(nn.Linear(3, 40), nn.Linear(40, 1))
    group = LocalWorld(1).groups[0]
    ddp = DistributedDataParallel(module, process_group=group, bucket_cap_mb=1e-4)
    returned, started, seen = threading.Event(), list[Any](), list[bool]()

    def inner(_: Any, bucket: Any) -> Any:
        seen.append(all(one.done() for one in started))
        found: Any = torch.futures.Future()
        started.append(found)
        if bucket.is_last():  # waited for at once
            found.set_result(bucket.buffer())
            return found

        def finish() -> None:
            seen.append(returned.wait(20.0))
            found.set_result(bucket.buffer())

        threading.Thread(target=finish).start()
        return found

    if make_hook is step_hook:
        hook = build_hook(OptimizerState(sgd(lr=0.5), ddp), inner, in_order=True)
    else:
        pairs = list(module.named_parameters())
        zero = ZeroRedundancyOptimizer(pairs, sgd(lr=0.5), group, overlap_with_ddp=True)
        hook = make_hook(inner, ddp, zero, in_order=True)

    def noted(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        found = hook(state, bucket)
        returned.set()
        return found

    ddp.register_comm_hook(None, noted)
    loss(ddp).backward()  # the first pass has one bucket
    returned.clear()
    started.clear()
    seen.clear()
    ddp.zero_grad()
    loss(ddp).backward()
    assert len(started) > 1
    assert all(seen)
