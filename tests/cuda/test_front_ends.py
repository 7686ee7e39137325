"""Tests of front-ends with parameters on a device: torch.optim's bits, checkpoints, scaler."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from functional_optim import (
    TorchOptimizer,
    adamw,
    as_functional_optim,
    chain,
    clip_by_global_norm,
    muon,
    partition,
    schedule_free_adamw,
    sgd,
)
from functional_optim.kernels import ExecutorName
from functional_optim.kernels.foreach import ForeachKernel
from functional_optim.native import LOOPS
from tests.front_ends.support import CASES, noise

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

SHAPES = ((3, 4), (37,), (), (2, 3), (70_001,), (0,), (64, 64))


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(noise(i, *shape, dtype=dtype).cuda()) for i, shape in enumerate(SHAPES)]


def set_grads(params: list[Any], seed: int, without: int = -1) -> None:
    for i, param in enumerate(params):
        grad = noise(7919 * (seed + 1) + i, *param.shape, dtype=param.dtype).cuda()
        param.grad = None if i == without else grad


def run(optimizer: torch.optim.Optimizer, *seeds: int) -> list[Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for seed in seeds:
        set_grads(params, seed, without=seed if seed % 2 else -1)
        optimizer.step()
    return params


def close(got: Any, want: Any, ulps: float) -> None:
    for a, b in zip(got, want, strict=True):
        one, two = a.detach(), b.detach()
        if one.numel():
            scale = float(two.abs().max())
            apart = float((one - two).abs().max())
            assert apart <= ulps * torch.finfo(two.dtype).eps * scale, (apart, scale)


@pytest.mark.parametrize("executor", ["reference", "auto", "blocked"])
@pytest.mark.parametrize("name", CASES)
def test_is_torchs(name: str, executor: ExecutorName) -> None:
    made, options = CASES[name]
    # torch's Adafactor divides by the number of elements, and fails for empty parameters.
    start, other = (
        [one for one in parameters() if one.numel() or made is not torch.optim.Adafactor]
        for _ in range(2)
    )
    theirs = made(start, foreach=False, **options)
    chain_of = as_functional_optim(made, **options).using(executor=executor)
    ours = TorchOptimizer(other, chain_of)
    with torch.no_grad():
        want, got = run(theirs, 0, 1, 2, 3), run(ours, 0, 1, 2, 3)
    close(got, want, 0.0)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "gradients contiguous"])
def test_prefer_fused_steps_what_torchs_fused_class_steps(layout: str) -> None:
    """torch's fused kernels step all parameters that they support; lists step the other ones."""
    pairs = []
    for _ in range(2):
        params = [*parameters(), *parameters(torch.bfloat16)]
        image = noise(99, 2, 3, 5, 5).cuda()
        if layout != "contiguous":
            image = image.to(memory_format=torch.channels_last)
        pairs.append([*params, nn.Parameter(image)])
    refused = layout == "gradients contiguous"
    theirs = torch.optim.AdamW(pairs[0], lr=0.1, fused=not refused)
    ours = TorchOptimizer(pairs[1], adamw(lr=0.1).using(executor="prefer_fused"))
    for seed in range(4):
        for own in pairs:
            set_grads(own, seed)
            if not refused:
                own[-1].grad = torch.empty_like(own[-1]).copy_(own[-1].grad)
        theirs.step()
        ours.step()
    for dtype, ulps in ((torch.float32, 256.0), (torch.bfloat16, 4.0)):
        close(*([one for one in pairs[k] if one.dtype is dtype] for k in (1, 0)), ulps)


def test_parameters_on_two_devices_are_stepped_as_by_torchs_for_loop() -> None:
    """Each device has its own kernels, even if the first step has no gradients."""
    pairs = []
    for _ in range(2):
        params = [nn.Parameter(noise(k, 70_001, dtype=torch.bfloat16)) for k in range(4)]
        pairs.append(
            [one if k % 2 else nn.Parameter(one.data.cuda()) for k, one in enumerate(params)]
        )
    theirs = torch.optim.SGD(pairs[0], lr=0.1, momentum=0.9, foreach=False)
    ours = TorchOptimizer(pairs[1], sgd(lr=0.1, momentum=0.9))
    for seed in range(4):
        for own in pairs:
            for k, param in enumerate(own):
                grad = noise(100 * seed + k, 70_001, dtype=torch.bfloat16).to(param.device)
                param.grad = grad if seed else None
        theirs.step()
        ours.step()
    close(pairs[1], pairs[0], 0.0)


def test_many_parameters_are_stepped_by_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists step all parameters in one call, with the C++ loops and without them."""
    calls: list[int] = []

    def noted(self: ForeachKernel, stages: Any, like: Any, columns: Any) -> Any:
        calls.append(len(columns[0]))
        return bind(self, stages, like, columns)

    bind = ForeachKernel.bind_lists
    monkeypatch.setattr(ForeachKernel, "bind_lists", noted)
    for loops in (False, True):
        if loops:
            LOOPS.get(3)
            LOOPS.wait()
        params = [nn.Parameter(noise(i, 100).cuda()) for i in range(300)]
        ours = TorchOptimizer(params, adamw(lr=0.1))
        for seed in range(5):
            calls.clear()
            set_grads(params, seed)
            ours.step()
        assert calls == [300]


@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True}, {"foreach": True}])
def test_checkpoints_of_torch(options: dict[str, bool]) -> None:
    theirs = torch.optim.AdamW(parameters(), lr=0.1, **options)
    run(theirs, 0, 1)
    ours = TorchOptimizer(parameters(), adamw(lr=0.1))
    with torch.no_grad():
        for one, two in zip(run(ours), run(theirs), strict=True):
            one.copy_(two)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    close(run(ours, 2, 3), run(theirs, 2, 3), 64.0)
    again = torch.optim.AdamW(parameters(), lr=0.1, **options)
    with torch.no_grad():
        for one, two in zip(run(again), run(theirs), strict=True):
            one.copy_(two)
    again.load_state_dict(ours.state_dict())
    close(run(again, 4), run(theirs, 4), 64.0)


COMPOSED: dict[str, Any] = {
    "clipped": lambda: chain(clip_by_global_norm(0.1), adamw(lr=0.1)),
    "schedule-free": lambda: schedule_free_adamw(lr=0.1),
    "parts": lambda: chain(
        clip_by_global_norm(0.5),
        partition(
            {"matrix": muon(lr=0.1), "rest": sgd(lr=0.1, momentum=0.9)},
            lambda path, shape: "matrix" if len(shape) == 2 and min(shape) else "rest",
        ),
    ),
}


@pytest.mark.parametrize("executor", ["reference", "auto", "blocked"])
@pytest.mark.parametrize("name", COMPOSED)
def test_composed_is_the_pure_step(name: str, executor: ExecutorName) -> None:
    optimizer = COMPOSED[name]()
    params = parameters()
    ours = TorchOptimizer(params, optimizer.using(executor=executor))
    pure: Any = [param.detach() for param in parameters()]
    state = optimizer.init(pure)
    for seed in range(4):
        set_grads(params, seed)
        ours.step()
        pure, state = optimizer.update(pure, [param.grad for param in params], state)
    with torch.no_grad():
        close(params, pure, 2.0**16 if name == "parts" else 256.0)


def test_grad_scaler() -> None:
    theirs, ours = (
        made(parameters(), lr=0.1)
        for made in (torch.optim.AdamW, lambda params, lr: TorchOptimizer(params, adamw(lr=lr)))
    )
    for optimizer in (theirs, ours):
        scaler = GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
        params = run(optimizer)
        for seed in range(5):
            optimizer.zero_grad()
            loss = sum((param * noise(seed, *param.shape).cuda()).sum() for param in params)
            if seed == 2:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    with torch.no_grad():
        close(run(ours), run(theirs), 64.0)


def test_a_learning_rate_on_the_device() -> None:
    rate = torch.tensor(0.1, device="cuda")
    ours = TorchOptimizer(parameters(), adamw(lr=rate))
    plain = TorchOptimizer(parameters(), adamw(lr=0.1))
    with torch.no_grad():
        close(run(ours, 0, 1), run(plain, 0, 1), 64.0)
