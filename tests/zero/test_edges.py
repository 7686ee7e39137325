"""Tests with one rank of corner cases: tiny parameters, odd layouts, lifetimes."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functional_optim import TorchOptimizer, adamw, chain, clip_by_global_norm, sgd, stored
from functional_optim.core.state import state_tensors
from functional_optim.storage import layout, pieces
from sharding import ZeroRedundancyOptimizer
from tests.zero_local.compare import same

pytestmark = pytest.mark.usefixtures("world_of_one")


def stepped(zero: Any, seed: int = 0) -> None:
    torch.manual_seed(seed)
    for param in zero.params.values():
        param.grad = torch.randn_like(param)
    zero.step()


def test_blocks_of_a_parameter_that_lies_in_another_order() -> None:
    """8-bit blocks follow the order of the shape, not the memory layout, as in one process."""
    torch.manual_seed(1)
    optimizer = stored(adamw(lr=0.1), state="int8")
    value = torch.randn(8, 16, 3, 3).to(memory_format=torch.channels_last)
    weight = nn.Parameter(value.clone())
    zero = ZeroRedundancyOptimizer([("w", weight)], optimizer)
    params, state = {"w": value}, optimizer.init({"w": value})
    sizes = torch.logspace(-4, 2, 8).view(8, 1, 1, 1)
    for _ in range(3):
        grad = torch.randn_like(weight) * sizes
        weight.grad = grad.clone()
        zero.step()
        params, state = optimizer.update(params, {"w": grad}, state)
    assert same(weight.detach(), params["w"])


@pytest.mark.parametrize("views", [False, True])
def test_parameters_are_freed_with_their_last_user(views: bool) -> None:
    """Reference counts free parameters and optimizer, without the garbage collector."""
    module = nn.Linear(3, 3)
    zero = ZeroRedundancyOptimizer(
        module.parameters(),
        chain(clip_by_global_norm(1.0), adamw()),
        parameters_as_bucket_view=views,
    )
    stepped(zero)
    seen = [weakref.ref(zero), *map(weakref.ref, module.parameters())]
    gc.disable()
    try:
        del module, zero
        assert [one() for one in seen] == [None] * 3
    finally:
        gc.enable()


def test_a_shard_without_its_optimizer_says_so() -> None:
    param = nn.Parameter(torch.ones(2))
    zero = ZeroRedundancyOptimizer([param], chain(clip_by_global_norm(1.0), adamw()))
    shard = zero.optim
    del zero
    param.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="is gone"):
        shard.step()
    assert param.tolist() == [1.0, 1.0]


def test_other_parameters_at_every_step_are_not_all_remembered() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(8)]
    zero = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.5)
    for number in range(100):
        for bit, param in enumerate(params):
            param.requires_grad_(bool((number + 1) >> bit & 1))
            param.grad = torch.ones(2) if param.requires_grad else None
        zero.step()
    assert len(zero._messages) <= 16
    steps = [sum((number + 1) >> bit & 1 for number in range(100)) for bit in range(8)]
    assert [param[0].item() for param in params] == [1 - 0.5 * count for count in steps]


def test_groups_that_are_all_empty() -> None:
    with pytest.raises(ValueError, match="all of them empty"):
        ZeroRedundancyOptimizer([{"params": []}, {"params": iter(())}], torch.optim.SGD)


def test_clipping_after_the_hook_has_stepped_is_refused() -> None:
    param = nn.Parameter(torch.ones(2))
    zero = ZeroRedundancyOptimizer([param], torch.optim.SGD, overlap_with_ddp=True)
    param.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="give max_norm to the hook"):
        zero.clip_grad_norm_(0.1)
    assert param.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("count", [8, 8192])
@pytest.mark.parametrize("kind", ["every other", "one for all"])
def test_gradients_of_ranges_with_gaps_between_their_elements(kind: str, count: int) -> None:
    optimizer = sgd(lr=0.1, momentum=0.9)
    values = torch.linspace(-1.0, 1.0, 2 * count)
    grad = values[::2] if kind == "every other" else values[:1].expand(count)
    param = nn.Parameter(torch.ones(2, count // 2))
    shaped = grad.reshape(param.shape)
    want, _ = optimizer.update(param.detach(), shaped, optimizer.init(param.detach()))
    zero = ZeroRedundancyOptimizer([param], optimizer, overlap_with_ddp=True)
    (one,) = zero.owned
    zero.step_owned({one.path: [(0, count, grad)]})
    assert torch.equal(param, want)


@pytest.mark.parametrize("executor", ["reference", "auto"])
def test_autograd_sees_that_state_was_written_to(executor: Any) -> None:
    param = nn.Parameter(torch.ones(9000))
    zero = ZeroRedundancyOptimizer([param], adamw(lr=0.1).using(executor=executor))
    weight = torch.ones(9000, requires_grad=True)
    for _ in range(3):
        state = zero.optim.state[param]
        followed = [(weight * state[name]).sum() for name in ("exp_avg", "exp_avg_sq")]
        param.grad = torch.ones_like(param)
        zero.step()
        for one in followed:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                one.backward()


def test_the_state_of_a_large_shard_is_made_some_blocks_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Encoded state is initialized in float32 by pieces, never for the whole shard at once."""
    asked: list[int] = []

    def noted(init: Any, param: Tensor, block_size: int) -> Any:
        def init_piece(piece: Tensor) -> Any:
            asked.append(piece.numel())
            return init(piece)

        return pieces.init_in_pieces(init_piece, param, block_size)

    monkeypatch.setattr(pieces, "PIECE", 1000)
    monkeypatch.setattr(layout, "init_in_pieces", noted)
    param = nn.Parameter(torch.linspace(-1.0, 1.0, 5000).view(50, 100))
    optimizer = stored(adamw(lr=0.1), state="int8")
    zero = ZeroRedundancyOptimizer([param], optimizer)
    assert max(asked) <= 1024 and sum(asked) >= 5000
    want = optimizer.init({"w": param.detach()}).leaves["w"]
    made = [one for one in zero.optim.state[param].values() if one.dim()]
    for one, other in zip(made, state_tensors(want.stages), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_state_that_was_written_for_a_frozen_parameter_is_continued() -> None:
    """It was overwritten when the parameter was trained."""
    twin = nn.Parameter(torch.ones(3))
    other = TorchOptimizer([twin], adamw(lr=0.1))
    for _ in range(2):
        twin.grad = torch.tensor([1.0, -2.0, 0.5])
        other.step()
    param = nn.Parameter(twin.detach().clone(), requires_grad=False)
    zero = ZeroRedundancyOptimizer([param], adamw(lr=0.1))
    assert param not in zero.optim.state
    zero.optim.state[param] = copy.deepcopy(other.state[twin])
    param.requires_grad_()
    param.grad = twin.grad
    other.step()
    zero.step()
    assert torch.equal(param, twin)
    assert int(zero.optim.state[param]["step"]) == 3
