"""A DDP module stepped by our hook beside its twin, stepped by torch.optim after backward."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from functional_optim import LeafState, Optimizer
from hooks import OptimizerState
from hooks.step_hook import build_hook

from .comparison import Pair, copied, dense, digest, fields, finite, moved, state_pairs, trainable
from .models import BATCH, WIDTH, Tower
from .torch_side import FOR_TORCH, INNER, Hook, on_cpu

MakeTorch = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


class Case(NamedTuple):
    """Comparison of our hook with a twin."""

    optimizer: Optimizer
    twin: MakeTorch
    """The torch.optim optimizer to compare with."""
    model: Callable[[], nn.Module] = Tower
    ddp: Mapping[str, Any] = {}
    """Further arguments of DistributedDataParallel, for both sides."""
    inner: str = "allreduce"
    in_order: bool = False
    executor: Any = "blocked"
    iterations: int = 4
    backwards: int = 1
    """Number of backward passes per iteration; all but the last are under ``no_sync``."""
    clip: float | None = None
    """Global norm to which the twin's gradients are clipped."""
    hyper: Mapping[int, Mapping[str, Any]] = {}
    """Hyper-parameters that change before an iteration, on our side by ``set_hyper``."""
    schedule: Callable[[int], float] | None = None
    """Learning rate of the twin, by iteration; our optimizer has the same schedule."""


def batch(rank: int, iteration: int, part: int = 0) -> tuple[Tensor, Tensor]:
    """Return inputs and targets that differ by rank and iteration, but are equal for twins."""
    chance = torch.Generator().manual_seed(1 + rank + 100 * part + 10_000 * iteration)
    x = torch.randn(BATCH, WIDTH, generator=chance)
    return x, torch.randn(BATCH, WIDTH, generator=chance)


def loss_of(model: nn.Module, rank: int, iteration: int, part: int = 0) -> Tensor:
    """Return the loss of this rank's batch."""
    x, target = batch(rank, iteration, part)
    output = model(x.to(next(model.parameters()).device), rank, iteration + part)
    loss: Tensor = (output - target.to(output)).square().mean()
    return loss


def backward(ddp: DistributedDataParallel, iteration: int, parts: int = 1) -> float:
    """Run forward and backward over some parts, of which only the last is synchronised."""
    rank = dist.get_rank(ddp.process_group)
    total = 0.0
    for part in range(parts):
        with nullcontext() if part == parts - 1 else ddp.no_sync():
            loss = loss_of(ddp, rank, iteration, part) / parts
            loss.backward()
            total += loss.item()
    return total


def wrapped(
    module: nn.Module, group: dist.ProcessGroup | None, options: Mapping[str, Any]
) -> DistributedDataParallel:
    """Wrap a module in DDP, without the warning about options that do not go together."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You passed find_unused_parameters=true to Distri")
        return DistributedDataParallel(module, process_group=group, **options)


class Ours:
    """DDP module with our hook."""

    def __init__(
        self,
        case: Case,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self.ddp = wrapped(module, group, case.ddp)
        self.state = OptimizerState(
            case.optimizer, self.ddp, **{"executor": case.executor, **options}
        )
        self.buckets: list[int] = []
        inner_state, inner = INNER[case.inner](group)
        hook = build_hook(self.state, noted(inner, self.buckets), in_order=case.in_order)
        self.ddp.register_comm_hook(inner_state, hook)

    def leaves(self) -> dict[str, LeafState]:
        """Return the state of all parameters; each call lists all tensors of the state."""
        return dict(self.state.state.leaves)

    def tensors(self) -> Iterator[Tensor]:
        """Yield parameters, state, and step counts."""
        leaves = self.leaves()
        for name, param in self.state.params.items():
            yield from (param, leaves[name].step, *fields(leaves[name]).values())


def noted(hook: Hook, buckets: list[int]) -> Hook:
    """Return a hook that records the number of parameters in each bucket."""

    def noting(state: Any, bucket: dist.GradBucket) -> Any:
        buckets.append(len(bucket.parameters()))
        return hook(state, bucket)

    return noting


class Twin:
    """DDP module with an optimizer of torch."""

    def __init__(
        self, case: Case, module: nn.Module, group: dist.ProcessGroup | None = None
    ) -> None:
        self.ddp = wrapped(module, group, case.ddp)
        inner_state, inner = FOR_TORCH[case.inner](group)
        self.ddp.register_comm_hook(inner_state, on_cpu(inner, in_order=case.in_order))
        self.clip = case.clip
        self.params = trainable(self.ddp)
        self.optimizer = case.twin(list(self.params.values()))
        self.steps = dict.fromkeys(self.params, 0)

    def step(self) -> float:
        """Step after backward; return the norm of the gradients, 0 if they are not clipped."""
        norm = 0.0
        if self.clip is not None:
            norm = nn.utils.clip_grad_norm_(self.params.values(), self.clip).item()
        for name, param in self.params.items():
            self.steps[name] += param.grad is not None
        self.optimizer.step()
        return norm

    def change(self, options: Mapping[str, Any]) -> None:
        """Set hyper-parameters in all groups."""
        for group in self.optimizer.param_groups:
            group.update(options)


def pairs(ours: Ours, twin: Twin) -> Iterator[Pair]:
    """Yield all pairs that must be equal."""
    leaves = ours.leaves()
    for name, param in trainable(ours.ddp).items():
        other = twin.params[name]
        yield Pair(name, param.detach(), other.detach())
        if twin.clip is None:  # clipping changes gradients in place
            yield Pair(f"{name}: gradient", dense(param.grad), dense(other.grad))
        entries = dict(twin.optimizer.state[other])
        yield from state_pairs(name, leaves[name], entries, twin.steps[name])
    buffers = dict(twin.ddp.module.named_buffers())
    for name, buffer in ours.ddp.module.named_buffers():
        yield Pair(name, buffer, buffers[name])


def made(case: Case, group: dist.ProcessGroup | None = None) -> tuple[Ours, Twin]:
    """Return both sides, with equal parameters."""
    torch.manual_seed(dist.get_rank())  # DDP itself makes the ranks start equal
    module = case.model()
    twin = Twin(case, copy.deepcopy(module), group)
    return Ours(case, module, group), twin


def compare(case: Case, group: dist.ProcessGroup | None = None) -> list[dict[str, Any]]:
    """Compare both sides; return the observations of each iteration, for JSON."""
    ours, twin = made(case, group)
    return [_iteration(case, ours, twin, number) for number in range(case.iterations)]


def _iteration(case: Case, ours: Ours, twin: Twin, number: int) -> dict[str, Any]:
    before = copied(ours.ddp)
    ours.buckets.clear()
    if number in case.hyper:
        ours.state.set_hyper(**case.hyper[number])
        twin.change(case.hyper[number])
    if case.schedule is not None:
        twin.change({"lr": case.schedule(number)})
    loss, _ = [backward(one.ddp, number, case.backwards) for one in (twin, ours)]
    norm = twin.step()
    found, leaves = list(pairs(ours, twin)), ours.leaves()
    seen = {
        "differences": [pair.name for pair in found if not pair.same],
        "apart": max(pair.apart for pair in found) if case.clip is not None else 0.0,
        "loss": loss,
        "norm": norm,
        "buckets": list(ours.buckets),
        "moved": moved(before, ours.ddp),
        "steps": {name: int(leaves[name].step) for name in before},
        "digest": digest(ours.tensors()),
        "finite": finite(ours.tensors()),
    }
    for one in (ours, twin):
        one.ddp.zero_grad()
    return seen
