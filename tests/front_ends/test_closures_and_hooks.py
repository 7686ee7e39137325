"""Closures, step hooks, gradients: what stands around a step."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from functional_optim import TorchOptimizer, adam, sgd

from .support import CASES, assert_same_tensors, parameters, params_of, set_grads, twins


def made(seed: int = 1) -> TorchOptimizer:
    return TorchOptimizer(parameters(seed), adam(0.1))


def test_a_closure_s_loss_is_returned_as_it_is() -> None:
    optimizer = made()
    for loss in (torch.tensor(1.5), 2.5, None, "anything"):
        assert optimizer.step(lambda loss=loss: loss) is loss
        assert optimizer.step(closure=lambda loss=loss: loss) is loss
    assert optimizer.step() is None


@pytest.mark.parametrize("enabled", [True, False])
def test_a_closure_runs_once_with_autograd_and_before_the_step(enabled: bool) -> None:
    optimizer = made()
    before = [param.detach().clone() for param in params_of(optimizer)]
    calls: list[bool] = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        assert_same_tensors(params_of(optimizer), before)
        optimizer.zero_grad()
        loss = torch.stack([param.square().sum() for param in params_of(optimizer)]).sum()
        loss.backward()
        return loss

    with torch.set_grad_enabled(enabled):
        loss = optimizer.step(closure)
        assert torch.is_grad_enabled() is enabled
    assert calls == [True]
    assert loss is not None
    assert loss.requires_grad
    assert all(not torch.equal(p, b) for p, b in zip(params_of(optimizer), before, strict=True))


def test_a_closure_that_fails_steps_nothing() -> None:
    optimizer = made()
    set_grads(params_of(optimizer), 0)
    before = [param.detach().clone() for param in params_of(optimizer)]

    def closure() -> None:
        raise ZeroDivisionError

    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        optimizer.step(closure)
    assert torch.is_grad_enabled()
    assert_same_tensors(params_of(optimizer), before)


def test_closures_drive_the_twins_alike() -> None:
    pair = twins(CASES["AdamW"])

    def closure_of(optimizer: torch.optim.Optimizer) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = torch.stack([p.sin().sum() for p in params_of(optimizer)]).sum()
            loss.backward()
            return loss

        return closure

    for _ in range(3):
        ours, theirs = (one.step(closure_of(one)) for one in (pair.ours, pair.theirs))
        assert torch.equal(ours, theirs)
        pair.assert_same()


def test_step_hooks_run_around_the_step_and_are_removed() -> None:
    optimizer = made()
    set_grads(params_of(optimizer), 0)
    start = [param.detach().clone() for param in params_of(optimizer)]
    seen: list[tuple[str, bool]] = []

    def hook(name: str) -> Any:
        def called(one: Any, args: Any, kwargs: Any) -> None:
            assert one is optimizer
            assert (args[1:], kwargs) == ((), {})
            seen.append((name, torch.equal(params_of(optimizer)[0], start[0])))

        return called

    handles = [
        optimizer.register_step_pre_hook(hook("pre")),
        optimizer.register_step_post_hook(hook("post")),
    ]
    optimizer.step()
    assert seen == [("pre", True), ("post", False)]
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(seen) == 2


def test_a_pre_hook_may_change_the_arguments() -> None:
    optimizer = made()
    optimizer.register_step_pre_hook(lambda one, args, kwargs: ((one, lambda: "from the hook"), {}))
    assert optimizer.step(lambda: "from the caller") == "from the hook"


@pytest.fixture
def seen_globally() -> Iterator[list[str]]:
    seen: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda one, *_: seen.append(f"pre {type(one).__name__}")),
        register_optimizer_step_post_hook(
            lambda one, *_: seen.append(f"post {type(one).__name__}")
        ),
    ]
    yield seen
    for handle in handles:
        handle.remove()


def test_global_hooks_see_it(seen_globally: list[str]) -> None:
    class Mine(TorchOptimizer):
        """A subclass is hooked once too."""

    optimizer = made()
    optimizer.step()
    assert seen_globally == ["pre TorchOptimizer", "post TorchOptimizer"]
    del seen_globally[:]
    Mine(parameters(1), sgd()).step()
    assert seen_globally == ["pre Mine", "post Mine"]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    optimizer = made()
    set_grads(params_of(optimizer), 0, without={1})
    optimizer.zero_grad(set_to_none)
    for index, param in enumerate(params_of(optimizer)):
        if set_to_none or index == 1:
            assert param.grad is None
        else:
            assert param.grad is not None
            assert not param.grad.any()


def test_gradients_with_a_graph_of_their_own() -> None:
    pair = twins(CASES["Adam"])
    for optimizer in (pair.ours, pair.theirs):
        loss = torch.stack([p.pow(3).sum() for p in params_of(optimizer)]).sum()
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", r"Using backward\(\) with create_graph=True", UserWarning
            )
            loss.backward(create_graph=True)
        optimizer.step()
        assert all(p.is_leaf and p.requires_grad for p in params_of(optimizer))
        optimizer.zero_grad()
    pair.assert_same()
    assert not any(
        value.requires_grad for entry in pair.ours.state.values() for value in entry.values()
    )


def test_a_gradient_of_another_dtype_is_named_before_anything_changes() -> None:
    optimizer = made()
    set_grads(params_of(optimizer), 0)
    odd = params_of(optimizer)[-1]
    odd.grad = None
    odd.grad_dtype = torch.bfloat16
    odd.grad = torch.ones_like(odd, dtype=torch.bfloat16)
    before = [param.detach().clone() for param in params_of(optimizer)]
    with pytest.raises(ValueError, match=r"param_groups\[0\]\[3\].*dtype"):
        optimizer.step()
    assert_same_tensors(params_of(optimizer), before)


def test_a_model_that_changed_its_dtype_before_the_first_step() -> None:
    model, twin = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    ours = TorchOptimizer(model.parameters(), adam(0.1))
    theirs = torch.optim.Adam(twin.parameters(), 0.1, foreach=False)
    for one, optimizer in ((model, ours), (twin, theirs)):
        one.double()
        for _ in range(2):
            optimizer.zero_grad()
            one(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
            optimizer.step()
    assert_same_tensors(list(model.parameters()), list(twin.parameters()))
