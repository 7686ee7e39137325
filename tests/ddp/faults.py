"""Things that must end in an error that says what is wrong; each returns what was raised."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from functional_optim import adamw, chain, clip_by_global_norm, sgd
from hooks import OptimizerState, step_hook

from .cases import ADAMW, SMALL, UNUSED
from .models import WIDTH, Tower
from .torch_side import Hook
from .twins import Ours, backward


def raised(action: Callable[[], object]) -> list[str]:
    """Type and text of what an action raises; empty if it raises nothing."""
    try:
        action()
    except Exception as error:  # noqa: BLE001  the test says which it should be
        return [type(error).__name__, str(error)]
    return []


def wrapped(**options: Any) -> DistributedDataParallel:
    """A tower under DDP, in several buckets from the first iteration on."""
    return DistributedDataParallel(Tower(), **{**UNUSED, **options})


# -- each parameter once ------------------------------------------------------------------------


def one_hook_on_two_modules(**options: Any) -> dict[str, Any]:
    """Two DDP modules around the same parameters, both with the hook of one OptimizerState."""
    module = Tower()
    both = [DistributedDataParallel(module, **options) for _ in range(2)]
    state = OptimizerState(sgd(lr=0.1), both[0])
    hook = step_hook(state)
    for ddp in both:
        ddp.register_comm_hook(None, hook)
    x = torch.ones(2, WIDTH)
    rank = dist.get_rank()
    return {
        "raised": raised(lambda: sum(ddp(x, rank, 0).sum() for ddp in both).backward()),
        "names": sorted(state.params),
        "steps": sorted(int(leaf.step) for leaf in state.state.leaves.values()),
    }


def in_no_bucket() -> list[str]:
    """``params=`` with one that DDP does not know."""
    ddp = wrapped()
    params = {**dict(ddp.module.named_parameters()), "stranger": nn.Parameter(torch.ones(2))}
    ddp.register_comm_hook(None, step_hook(OptimizerState(sgd(), ddp, params=params)))
    return raised(lambda: backward(ddp, 0))


def thawed() -> list[str]:
    """A parameter that requires gradients only after DDP has wrapped it."""
    module = Tower()
    module.layers[1].weight.requires_grad_(False)
    ddp = DistributedDataParallel(module, **SMALL)
    module.layers[1].weight.requires_grad_(True)
    ddp.register_comm_hook(None, step_hook(OptimizerState(sgd(), ddp)))
    return raised(lambda: backward(ddp, 0))


def frozen_but_named() -> list[str]:
    """``params=`` with one that requires no gradient."""
    module = Tower()
    module.layers[1].weight.requires_grad_(False)
    ddp = DistributedDataParallel(module, **UNUSED)

    def train() -> None:
        params = dict(module.named_parameters())
        ddp.register_comm_hook(None, step_hook(OptimizerState(sgd(), ddp, params=params)))
        backward(ddp, 0)

    return raised(train)


class HalfUsed(nn.Module):
    """One layer has no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)
        self.used = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
        return self.used(x)


def skipped_by_ddp() -> dict[str, Any]:
    """DDP is told to leave out the buckets that nobody uses."""
    ddp = DistributedDataParallel(HalfUsed(), **UNUSED, skip_all_reduce_unused_params=True)
    state = OptimizerState(sgd(lr=0.1), ddp)
    ddp.register_comm_hook(None, step_hook(state))

    def train() -> None:
        for iteration in range(2):
            backward(ddp, iteration)
            ddp.zero_grad()

    found = raised(train)
    steps = {name: int(leaf.step) for name, leaf in state.state.leaves.items()}
    return {"raised": found, "steps": steps}


# -- inner hooks --------------------------------------------------------------------------------


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _too_small(group: Any, bucket: dist.GradBucket) -> Future[Any]:
    return _done(bucket.buffer()[:3])


def _no_tensor(group: Any, bucket: dist.GradBucket) -> Future[Any]:
    return _done("gradients")


def _fails_later(group: Any, bucket: dist.GradBucket) -> Future[Any]:
    def fail(done: Future[Tensor]) -> Tensor:
        raise OSError(f"bucket {bucket.index()} is lost")

    reduced = allreduce_hook(group, bucket)
    return reduced.then(fail) if bucket.index() == 1 else reduced


def _fails_at_once(group: Any, bucket: dist.GradBucket) -> Future[Any]:
    if bucket.index() == 1:
        raise OSError("bucket 1 is lost")
    return allreduce_hook(group, bucket)


INNER: dict[str, Hook] = {
    "too small": _too_small,
    "no tensor": _no_tensor,
    "fails later": _fails_later,
    "fails at once": _fails_at_once,
}


def inner_hook(name: str, measured: bool = False) -> list[str]:
    """An inner hook that breaks its promise, on all ranks."""
    ddp = wrapped()
    optimizer = chain(clip_by_global_norm(1.0), sgd()) if measured else sgd()
    ddp.register_comm_hook(None, step_hook(OptimizerState(optimizer, ddp), INNER[name]))
    return raised(lambda: backward(ddp, 0))


# -- what OptimizerState refuses ----------------------------------------------------------------


def refused() -> dict[str, list[str]]:
    """Arguments of OptimizerState, and of set_hyper, that cannot be right."""
    ddp = wrapped()
    state = OptimizerState(sgd(lr=0.1), ddp)
    params = dict(ddp.module.named_parameters())
    half = dict(list(params.items())[:3])
    wider = {name: torch.ones(3, 2) for name in params}
    twice = {**params, "again": params["layers.0.bias"]}
    momentum = sgd(momentum=0.9)
    return {
        "no DDP": raised(lambda: OptimizerState(sgd(), ddp.module)),
        "no state": raised(lambda: OptimizerState(sgd(), ddp, state={})),
        "half a state": raised(lambda: OptimizerState(sgd(), ddp, state=sgd().init(half))),
        "another shape": raised(lambda: OptimizerState(adamw(), ddp, state=adamw().init(wider))),
        "another optimizer": raised(lambda: OptimizerState(adamw(), ddp, state=sgd().init(params))),
        "another option": raised(lambda: OptimizerState(momentum, ddp, state=sgd().init(params))),
        "twice": raised(lambda: OptimizerState(sgd(), ddp, params=twice)),
        "no params": raised(lambda: OptimizerState(sgd(), ddp, params={})),
        "no tensor": raised(lambda: OptimizerState(sgd(), ddp, params={"x": 1.0})),
        "executor": raised(lambda: OptimizerState(sgd(), ddp, executor="fast")),
        "unknown hyper": raised(lambda: state.set_hyper(beta=0.1)),
        "wrong hyper": raised(lambda: state.set_hyper(lr=-1.0)),
        "hyper without state": raised(lambda: state.set_hyper(momentum=0.9)),
    }


def ignored() -> dict[str, Any]:
    """DDP is told to ignore a parameter: refused, unless ``params=`` leaves it out."""
    module = Tower()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["layers.1.weight"])
    ddp = DistributedDataParallel(module, **SMALL)
    rest = {name: p for name, p in module.named_parameters() if name != "layers.1.weight"}
    before = module.layers[1].weight.detach().clone()

    def train() -> None:
        ddp.register_comm_hook(None, step_hook(OptimizerState(sgd(lr=0.1), ddp, params=rest)))
        backward(ddp, 0)

    return {
        "all": raised(lambda: OptimizerState(sgd(), ddp)),
        "rest": raised(train),
        "left alone": torch.equal(before, module.layers[1].weight),
    }


# -- one rank in trouble ------------------------------------------------------------------------


def one_fails(rank_that_fails: int, linger: float) -> dict[str, Any]:
    """A rank fails in the middle of backward, and lives on for some seconds."""
    torch.manual_seed(0)
    ours = Ours(ADAMW._replace(ddp=UNUSED), Tower())
    backward(ours.ddp, 0)
    ours.ddp.zero_grad()

    def fail(gradient: Tensor) -> None:
        raise OSError("the disk is full")

    fails = dist.get_rank() == rank_that_fails
    if fails:
        ours.ddp.module.layers[2].weight.register_hook(fail)
    start = time.monotonic()
    found = raised(lambda: backward(ours.ddp, 1))
    seconds = time.monotonic() - start
    if fails:
        time.sleep(linger)
    return {"raised": found, "seconds": seconds}
