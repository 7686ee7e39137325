"""``step_hook(ddp, optimizer)``: the optimizer of a training loop that has no ``step()``."""

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    adamw,
    chain,
    clip_by_global_norm,
    schedule_free_sgd,
    sgd,
)
from hooks import OptimizerState, step_hook, zero_step_hook
from sharding import ZeroRedundancyOptimizer
from tests.choices import case

from .support import assert_same, loss, model

pytestmark = pytest.mark.usefixtures("world_of_one")

SMALL: dict[str, Any] = {"bucket_cap_mb": 1e-5}
"""Options of DDP that give each parameter its own bucket."""


def wrapped(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model(), **options)


def twin(optimizer: Optimizer) -> tuple[Any, TorchOptimizer]:
    module = model()
    return module, TorchOptimizer(module.named_parameters(), optimizer)


# -- one call -----------------------------------------------------------------------------------


def test_it_registers_itself_and_returns_the_state() -> None:
    """step_hook registers the hook, calls the inner hook with its state, and returns the state."""
    seen: list[Any] = []

    def inner(state: Any, bucket: Any) -> Any:
        seen.append(state)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp = wrapped()
    state = step_hook(ddp, torch.optim.AdamW, inner_hook=inner, inner_state="mine", lr=0.1)
    module, plain = twin(adamw(lr=0.1))
    for iteration in range(3):
        for one, optimizer in ((ddp, state), (module, plain)):
            loss(one, iteration).backward()
            if optimizer is plain:
                optimizer.step()
            optimizer.zero_grad()
        assert_same(ddp.module, module)
    assert isinstance(state, OptimizerState) and set(seen) == {"mine"}
    with pytest.raises(RuntimeError, match="register_comm_hook"):
        step_hook(ddp, adamw())


def test_the_spelling_before() -> None:
    """The earlier form still works: make a state, then register the hook."""
    ddp = wrapped()
    state = OptimizerState(adamw(lr=0.1), ddp)
    with pytest.warns(DeprecationWarning, match=r"step_hook\(ddp, optimizer\)"):
        hook = step_hook(state, in_order=True)
    ddp.register_comm_hook(None, hook)
    module, plain = twin(adamw(lr=0.1))
    loss(ddp, 0).backward()
    loss(module, 0).backward()
    plain.step()
    assert_same(ddp.module, module)


def test_it_goes_on_from_a_state_that_init_made_where_autograd_is_on() -> None:
    """A state from ``init`` works if autograd was on (fault 31)."""
    ddp, optimizer = wrapped(), schedule_free_sgd(lr=0.1)
    state = step_hook(ddp, optimizer, state=optimizer.init(dict(ddp.module.named_parameters())))
    module, plain = twin(optimizer)
    for iteration in range(2):
        for one in (ddp, module):
            one.zero_grad()
            loss(one, iteration).backward()
        plain.step()
        assert_same(ddp.module, module)
    assert not any(one.stages[-1].z.requires_grad for one in state.state.leaves.values())


# -- schedulers ---------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda one: lr_scheduler.StepLR(one, 2, 0.5),
    "cosine": lambda one: lr_scheduler.CosineAnnealingLR(one, 4),
    "one cycle": lambda one: lr_scheduler.OneCycleLR(one, 0.2, total_steps=6),
    "in sequence": lambda one: lr_scheduler.SequentialLR(
        one,
        [lr_scheduler.ConstantLR(one, 0.1, 2), lr_scheduler.ExponentialLR(one, 0.5)],
        milestones=[2],
    ),
}


def test_schedulers_of_torch_drive_it() -> None:
    """torch's schedulers drive a step hook like a TorchOptimizer, without a warning (fault 32)."""
    for name, make in SCHEDULERS.items():
        for optimizer in (adamw(lr=0.1), chain(clip_by_global_norm(1.0), adamw(lr=0.1))):
            ddp = wrapped(**SMALL)
            state = step_hook(ddp, optimizer)
            module, plain = twin(optimizer)
            schedulers = [make(state), make(plain)]
            for iteration in range(5):
                for one in (ddp, module):
                    one.zero_grad()
                    loss(one, iteration).backward()
                plain.step()
                for scheduler in schedulers:
                    scheduler.step()
                with case(name=name, optimizer=optimizer, iteration=iteration):
                    assert_same(ddp.module, module)
                    assert state.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


def test_the_plateau_scheduler_drives_it() -> None:
    """The plateau scheduler gets losses, and changes the learning rate (fault 32)."""
    state = step_hook(wrapped(), adamw(lr=0.1))
    scheduler = lr_scheduler.ReduceLROnPlateau(state, patience=0)
    for _ in range(3):
        scheduler.step(1.0)
    assert state.param_groups[0]["lr"] < 0.1


# -- other methods of an optimizer --------------------------------------------------------------


def test_hooks_on_steps_see_one_step_in_an_iteration() -> None:
    """Global and own hooks see one step, when all buckets are stepped (fault 32)."""
    seen: list[Any] = []
    for optimizer in (adamw(lr=0.1), chain(clip_by_global_norm(1.0), adamw(lr=0.1))):
        ddp = wrapped(**SMALL)
        state = step_hook(ddp, optimizer)
        state.register_step_post_hook(lambda one, *_: seen.append(one))
        handles = [
            register_optimizer_step_pre_hook(lambda *_: seen.append("before")),
            register_optimizer_step_post_hook(
                lambda one, *_: seen.append({int(k.step) for k in one.state.leaves.values()})
            ),
        ]
        try:
            for iteration in range(3):
                loss(ddp, iteration).backward()
                state.zero_grad()
                assert seen == ["before", state, {iteration + 1}]
                seen.clear()
        finally:
            for one in handles:
                one.remove()
    with pytest.raises(RuntimeError, match="as soon as it is reduced"):
        state.register_step_pre_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="parameters of a step hook are fixed"):
        state.add_param_group({"params": [torch.ones(1)]})


def test_step_does_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """A closure is called, and the hook steps in its backward pass."""
    ddp = wrapped()
    state = step_hook(ddp, sgd(lr=0.1))
    with caplog.at_level(logging.WARNING):
        assert state.step() is None
    assert "take the call out of the loop" in caplog.text

    def closure() -> Tensor:
        value = loss(ddp, 0)
        value.backward()
        return value

    before = ddp.module[0].weight.detach().clone()
    assert state.step(closure).requires_grad
    assert not torch.equal(ddp.module[0].weight, before)


def test_a_grad_scaler_is_refused() -> None:
    """A GradScaler comes too late: the hook has already stepped by scaled gradients."""
    ddp = wrapped()
    state = step_hook(ddp, sgd(lr=1e-9))
    scaler = GradScaler("cpu")
    scaler.scale(loss(ddp, 0)).backward()
    with pytest.raises(RuntimeError, match="stepped by scaled ones"):
        scaler.step(state)


# -- gradients that were not cleared ------------------------------------------------------------


def by_step_hook(**options: Any) -> DistributedDataParallel:
    ddp = wrapped(**options)
    step_hook(ddp, sgd(lr=1e-3))
    return ddp


def by_zero(**options: Any) -> DistributedDataParallel:
    ddp = wrapped(**options)
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=1e-3
    )
    ddp.register_comm_hook(None, zero_step_hook(ddp, zero))
    return ddp


OPTIONS: dict[str, dict[str, Any]] = {
    "as usual": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


def test_a_forgotten_zero_grad_is_told_of_once() -> None:
    """A forgotten ``zero_grad`` warns once: the next backward pass steps by the sum (fault 32)."""
    for make in (by_step_hook, by_zero):
        for name, options in OPTIONS.items():
            ddp = make(**options)
            with case(make=make.__name__, options=name), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
                loss(ddp, 0).backward()
                with pytest.warns(UserWarning, match="gradients were not cleared"):
                    loss(ddp, 1).backward()
                loss(ddp, 2).backward()  # no second warning


def test_cleared_gradients_and_accumulation_pass() -> None:
    """Gradients are set to None or zero, before or after forward, or summed under ``no_sync``."""
    for make in (by_step_hook, by_zero):
        for name, options in OPTIONS.items():
            for to_none in (True, False):
                ddp = make(**options)
                with case(make=make.__name__, options=name, to_none=to_none):
                    for iteration in range(3):
                        if name != "static":
                            with ddp.no_sync():
                                loss(ddp, iteration).backward()
                        value = loss(ddp, iteration)
                        if name == "static":
                            ddp.zero_grad(set_to_none=to_none)
                        value.backward()
                        if name != "static":
                            ddp.zero_grad(set_to_none=to_none)


class _NoDerivative(torch.autograd.Function):
    """Operation without a derivative by its second argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Scaled(nn.Module):
    """Layer with a scale, which ``way`` includes in the output or not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, way: str) -> Tensor:
        made: Tensor = self.layer(x)
        if way == "no derivative":
            made = _NoDerivative.apply(made, self.scale)
        return made * self.scale if way == "used" else made


@pytest.mark.parametrize("way", ["no derivative", "autograd.grad"])
@pytest.mark.parametrize("by_hook", [True, False])
def test_a_parameter_without_a_gradient_from_ddp_is_left_alone(by_hook: bool, way: str) -> None:
    """Momentum or weight decay would move the parameter; a warning would fail the test."""
    torch.manual_seed(0)
    nets = Scaled(), Scaled()
    nets[1].load_state_dict(nets[0].state_dict())
    ddps = [DistributedDataParallel(net, find_unused_parameters=True) for net in nets]
    chosen = adamw(lr=0.1, weight_decay=0.1)
    if by_hook:
        step_hook(ddps[0], chosen)
    else:
        zero = ZeroRedundancyOptimizer(nets[0].named_parameters(), chosen, overlap_with_ddp=True)
        ddps[0].register_comm_hook(None, zero_step_hook(ddps[0], zero))
    theirs = torch.optim.AdamW(nets[1].parameters(), lr=0.1, weight_decay=0.1)
    for iteration in range(4):
        for ddp, net in zip(ddps, nets, strict=True):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(iteration))
            value = ddp(x, "used" if iteration == 0 else way).square().mean()
            ddp.zero_grad()
            value.backward()
            if iteration:
                assert net.scale.grad is None
        theirs.step()
        if way == "autograd.grad":
            for net in nets:  # as a user does who logs the gradient of a penalty
                torch.autograd.grad(net.scale.square().sum(), net.scale)
        for ours, wanted in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            assert torch.equal(ours, wanted), iteration
