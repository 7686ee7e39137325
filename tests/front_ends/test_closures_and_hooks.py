"""Closures, step hooks and gradients of TorchOptimizer."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from functional_optim import TorchOptimizer, adam, sgd
from tests.choices import each

from .support import (
    assert_same_params,
    assert_same_tensors,
    parameters,
    params_of,
    set_grads,
    twins,
    values_of,
)


def made() -> TorchOptimizer:
    """Return an optimizer whose parameters have gradients."""
    params = parameters()
    set_grads(params, 0)
    return TorchOptimizer(params, adam(0.1))


def loss_of(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.stack([param.sin().sum() for param in params_of(optimizer)]).sum()


def closure_of(optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(optimizer)
        loss.backward()
        return loss

    return closure


def test_a_closure_s_loss_is_returned_as_it_is() -> None:
    optimizer = made()
    for loss in (torch.tensor(1.5), 2.5, None, "anything"):
        assert optimizer.step(lambda loss=loss: loss) is loss
        assert optimizer.step(closure=lambda loss=loss: loss) is loss
    assert optimizer.step() is None


@each(enabled=[True, False])
def test_a_closure_runs_once_with_autograd_and_before_the_step(enabled: bool) -> None:
    pair = twins("AdamW")
    calls: list[bool] = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        assert_same_params(pair.ours, pair.theirs)
        return closure_of(pair.ours)()

    for seed in range(2):
        with torch.set_grad_enabled(enabled):
            loss = pair.ours.step(closure)
            assert torch.is_grad_enabled() is enabled
        assert len(calls) == seed + 1
        assert loss.requires_grad
        assert torch.equal(loss, pair.theirs.step(closure_of(pair.theirs)))
        pair.assert_same()
    assert all(calls)


def test_a_closure_that_fails_steps_nothing() -> None:
    optimizer = made()
    before = values_of(optimizer)

    def closure() -> None:
        raise ZeroDivisionError

    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        optimizer.step(closure)
    assert torch.is_grad_enabled()
    assert_same_tensors(params_of(optimizer), before)


def test_step_hooks_run_around_the_step_and_are_removed() -> None:
    optimizer = made()
    start = values_of(optimizer)
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


def test_global_hooks_see_it_once_and_a_subclass_too() -> None:
    class Mine(TorchOptimizer):
        """Subclass whose steps run each hook once."""

    seen: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda one, *_: seen.append(f"pre {type(one).__name__}")),
        register_optimizer_step_post_hook(
            lambda one, *_: seen.append(f"post {type(one).__name__}")
        ),
    ]
    try:
        for cls in (TorchOptimizer, Mine):
            cls(parameters(), sgd()).step()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["pre TorchOptimizer", "post TorchOptimizer", "pre Mine", "post Mine"]


@each(set_to_none=[True, False])
def test_zero_grad(set_to_none: bool) -> None:
    optimizer = made()
    params_of(optimizer)[1].grad = None
    optimizer.zero_grad(set_to_none)
    for index, param in enumerate(params_of(optimizer)):
        if set_to_none or index == 1:
            assert param.grad is None
        else:
            assert param.grad is not None
            assert not param.grad.any()


def test_gradients_with_a_graph_of_their_own() -> None:
    pair = twins("Adam")
    for optimizer in pair.both:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", r"Using backward\(\) with create_graph=True", UserWarning
            )
            loss_of(optimizer).backward(create_graph=True)
        optimizer.step()
        assert all(p.is_leaf and p.requires_grad for p in params_of(optimizer))
        optimizer.zero_grad()
    pair.assert_same()
    states = pair.ours.state.values()
    assert not any(value.requires_grad for entries in states for value in entries.values())


def test_a_gradient_of_another_dtype_is_named_before_anything_changes() -> None:
    optimizer = made()
    odd = params_of(optimizer)[-1]
    odd.grad = None
    odd.grad_dtype = torch.bfloat16
    odd.grad = torch.ones_like(odd, dtype=torch.bfloat16)
    before = values_of(optimizer)
    with pytest.raises(ValueError, match=r"param_groups\[0\]\[3\].*dtype"):
        optimizer.step()
    assert_same_tensors(params_of(optimizer), before)


def test_gradients_in_place_of_a_closure_are_refused() -> None:
    """Gradients are arguments of ``update``. The error comes before any step."""
    optimizer = TorchOptimizer(parameters(), sgd(0.1))
    with pytest.raises(TypeError, match=r"closure must be a function .*reads gradients from the"):
        optimizer.step([torch.ones(2)])  # type: ignore[arg-type]
