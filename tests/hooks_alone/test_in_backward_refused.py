"""Optimizers in backward: cases that cannot step correctly, which are refused."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from functional_optim import adamw, chain, clip_by_global_norm, clip_by_value, sgd
from hooks import apply_optimizer_in_backward
from hooks.in_backward import get_in_backward_optimizers, reduce_in_backward
from tests.choices import case

from .support import model


class Stranger:
    """Class that is no optimizer."""

    def __init__(self, params: Any, lr: float) -> None:
        self.lr = lr


ONE = [nn.Parameter(torch.ones(1))]
CLIPS = chain(clip_by_global_norm(1.0), sgd(lr=0.1))
REFUSED: dict[str, tuple[Any, Any, Any, type[Exception], str]] = {
    "a tensor": (sgd, torch.ones(2), {}, TypeError, "got Tensor; put a single one into a list"),
    "a number": (sgd, 3, {}, TypeError, "got int"),
    "no tensor": (sgd, [1.0], {}, TypeError, r"params\[1\] must be a parameter .*, got float"),
    "a dict without params": (sgd, [{"lr": 1.0}], {}, ValueError, "without 'params'"),
    "nothing": (sgd, iter(()), {}, ValueError, "no parameter; was it a generator"),
    "no leaf": (sgd, [ONE[0] * 2], {}, ValueError, r"params\[1\] is no leaf: it was computed \(<M"),
    "frozen": (sgd, [("w", torch.ones(1))], {}, ValueError, "w requires no gradient"),
    "measured": (CLIPS, ONE, {}, ValueError, "clip_by_global_norm needs the gradients of all"),
    "a closure": (torch.optim.LBFGS, ONE, {}, ValueError, "LBFGS evaluates the model several"),
    "no class": ("sgd", ONE, {}, TypeError, "got 'sgd'"),
    "another class": (Stranger, ONE, {"lr": 1.0}, TypeError, r"of \[param\], got Stranger"),
    "a transform": (
        clip_by_value,
        ONE,
        {"clip_value": 1.0},
        TypeError,
        "a constructor must return a functional_optim.Optimizer",
    ),
    "an unknown hyper-parameter": (adamw(), ONE, {"momentum": 0.9}, TypeError, "momentum"),
    "out of bounds": (torch.optim.SGD, ONE, {"lr": -1.0}, ValueError, "Invalid learning rate"),
    "no dict": (sgd, ONE, None, TypeError, "must be a dict"),
}


def test_refused_before_anything_is_changed() -> None:
    for name, (optimizer_class, params, kwargs, error, text) in REFUSED.items():
        fine = nn.Parameter(torch.ones(3))
        given = [fine, *params] if isinstance(params, list) else params
        with case(refused=name):
            with pytest.raises(error, match=text):
                apply_optimizer_in_backward(optimizer_class, given, kwargs)
            assert not hasattr(fine, "_in_backward_optimizers")
            fine.sum().backward()
            assert torch.equal(fine, torch.ones(3)) and fine.grad is not None


def test_an_error_names_the_parameter() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate") as caught:
        apply_optimizer_in_backward(torch.optim.SGD, model().named_parameters(), {"lr": -1.0})
    assert caught.value.__notes__ == ["(the optimizer of 0.weight, of shape (8, 6))"]


# -- with DDP: never on a gradient of one rank alone ----------------------------------------------


def linear() -> nn.Linear:
    module = nn.Linear(2, 1, bias=False)
    nn.init.ones_(module.weight)
    return module


def apply(module: nn.Module, ddp: Any = False) -> None:
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 1.0}, ddp=ddp)


def run(module: nn.Module) -> None:
    module(torch.ones(1, 2)).sum().backward()


def is_untouched(module: nn.Module) -> bool:
    return not get_in_backward_optimizers(module) and module.weight.tolist() == [[1.0, 1.0]]


@pytest.mark.usefixtures("world_of_one")
def test_with_a_process_group_it_is_said_what_reduces_gradients() -> None:
    module, other = linear(), linear()
    ddp = DistributedDataParallel(module)
    for named, error, text in [
        (None, ValueError, r"reduces the gradient of params\[0\] .*ddp=module.*ddp=False"),
        (True, TypeError, "or False where none does, got bool"),
        (module, TypeError, "got Linear"),
        (DistributedDataParallel(other), ValueError, r"params\[0\] is no parameter of ddp.module"),
    ]:
        with case(named=named):
            with pytest.raises(error, match=text):
                apply(module, named)
            assert is_untouched(module)
    with pytest.raises(TypeError, match="must be a DistributedDataParallel module, got Linear"):
        reduce_in_backward(module)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no parameter of ddp.module has an optimizer in"):
        reduce_in_backward(ddp)
    apply(module, ddp)
    apply(module, None)  # ddp is known from the call before
    run(ddp)
    assert module.weight.tolist() == [[-1.0, -1.0]]


@pytest.mark.usefixtures("world_of_one")
def test_a_ddp_module_that_has_another_hook() -> None:
    ddp = DistributedDataParallel(linear())
    ddp.register_comm_hook(dist.group.WORLD, allreduce_hook)
    with pytest.raises(RuntimeError, match=r"this DDP module has another one.*hooks\.step_hook"):
        apply(ddp, ddp)
    assert is_untouched(ddp.module)
    run(ddp)
    assert is_untouched(ddp.module)


@pytest.mark.usefixtures("world_of_one")
def test_a_ddp_module_that_was_not_called_since() -> None:
    """Optimizers are applied between forward and backward, or before wrapping in DDP."""
    between = DistributedDataParallel(linear())
    value = between(torch.ones(1, 2)).sum()
    apply(between, between)
    with pytest.raises(RuntimeError, match="was not called before this backward pass"):
        value.backward()
    early = linear()
    apply(early)
    ddp = DistributedDataParallel(early)
    for one in (ddp.module, early):
        with pytest.raises(RuntimeError, match=r"was made around it since.*reduce_in_backward"):
            run(one)
    for one in (between.module, early):
        assert one.weight.tolist() == [[1.0, 1.0]]
    early.weight.grad = None
    reduce_in_backward(ddp)
    run(ddp)
    assert early.weight.tolist() == [[0.0, 0.0]]


@pytest.mark.usefixtures("world_of_one")
def test_a_module_called_without_its_ddp_module() -> None:
    alone = linear()
    ddp = DistributedDataParallel(alone)
    apply(alone, ddp)
    run(ddp)
    assert alone.weight.tolist() == [[0.0, 0.0]]
    with pytest.raises(RuntimeError, match="was not called before this backward pass"):
        run(alone)
    assert alone.weight.tolist() == [[0.0, 0.0]]
    alone.weight.grad = None
    run(ddp)
    assert alone.weight.tolist() == [[-1.0, -1.0]] and alone.weight.grad is None
    del ddp
    gc.collect()
    run(alone)  # there is no DDP module any more
    assert alone.weight.tolist() == [[-2.0, -2.0]]
    again = DistributedDataParallel(alone)
    reduce_in_backward(again)
    run(again)
    assert alone.weight.tolist() == [[-3.0, -3.0]]


@pytest.mark.usefixtures("world_of_one")
def test_a_parameter_that_ddp_reduces_late() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    ddp = DistributedDataParallel(
        module,
        delay_all_reduce_named_params=[("0.weight", module[0].weight)],
        param_to_hook_all_reduce=module[1].weight,
    )
    with pytest.raises(
        RuntimeError, match=r"'0\.weight' has an optimizer in.* DDP reduces it late"
    ):
        apply(module, ddp)
    assert not get_in_backward_optimizers(module)


@pytest.mark.usefixtures("world_of_one")
def test_torch_s_ddp_does_not_find_optimizers_that_were_applied_before_wrapping() -> None:
    """torch's DDP does not register its own hook at the first forward pass."""
    module = linear()
    apply(module)
    ddp = DistributedDataParallel(module)
    reduce_in_backward(ddp)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        ddp(torch.ones(1, 5))
    for _ in range(2):
        run(ddp)
    assert len(get_in_backward_optimizers(module)) == 1
    assert module.weight.tolist() == [[-1.0, -1.0]]
