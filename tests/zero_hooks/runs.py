"""DDP module that a ZeRO hook steps, and one process that computes the same."""

import copy
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from functional_optim import Optimizer, adamw
from hooks import hook_with_zero_step, hook_with_zero_step_interleaved, zero_step_hook
from sharding import ZeroRedundancyOptimizer
from sharding.problem import Policy
from tests.ddp import comparison, models, torch_side, twins

Named = dict[str, nn.Parameter]
_SEED = threading.Lock()
"""Lock for torch's global random state, which ranks share if they are threads."""


class Case(NamedTuple):
    """Comparison of ranks with one process."""

    kind: str = "scatter"
    """Kind of hook, see :data:`KINDS`."""
    optimizer: Optimizer = adamw(lr=1e-2, weight_decay=0.1)
    oracle: Optimizer | None = None
    """Optimizer of the one process, or None for ``optimizer``."""
    model: Callable[[], nn.Module] = models.Tower
    ddp: Mapping[str, Any] = {}
    policy: str | Policy = "greedy"
    groups: Callable[[Named], list[dict[str, Any]]] | None = None
    hook: Mapping[str, Any] = {}
    """Further arguments of the hook."""
    zero: Mapping[str, Any] = {}
    """Further arguments of ZeroRedundancyOptimizer."""
    inner: str = "allreduce"
    iterations: int = 4
    backwards: int = 1
    hyper: Mapping[int, Mapping[str, Any]] = {}
    """New hyper-parameters, by the iteration before which they change."""


def fresh(model: Callable[[], nn.Module]) -> nn.Module:
    """Return the same model on all ranks, also on threads."""
    with _SEED:
        torch.manual_seed(0)
        return model()


def backward(ddp: DistributedDataParallel, number: int, parts: int = 1) -> float:
    """Run forward and backward on the data of this rank; all parts but the last use ``no_sync``."""
    total = 0.0
    for part in range(parts):
        with nullcontext() if part == parts - 1 else ddp.no_sync():
            loss = twins.loss_of(ddp, ddp.process_group.rank(), number, part) / parts
            loss.backward()
            total += loss.item()
    return total


INNER_KINDS = {
    "held": hook_with_zero_step,
    "interleaved": hook_with_zero_step_interleaved,
}
KINDS = ("scatter", *INNER_KINDS)
"""zero_step_hook, and torch's two hooks."""


class Run:
    """DDP module with its optimizer and its hook."""

    def __init__(
        self, case: Case, module: nn.Module, group: dist.ProcessGroup | None = None
    ) -> None:
        self.case = case
        self.ddp = DistributedDataParallel(
            module, process_group=group, **{"bucket_cap_mb": 0.03, **case.ddp}
        )
        self.group = self.ddp.process_group
        named = dict(module.named_parameters())
        params = case.groups(named) if case.groups else list(named.items())
        self.zero = ZeroRedundancyOptimizer(
            params,
            case.optimizer,
            process_group=group,
            overlap_with_ddp=True,
            policy=case.policy,
            **case.zero,
        )
        state: Any = None
        if case.kind in INNER_KINDS:
            state, inner = torch_side.INNER[case.inner](self.ddp.process_group)
            self.hook = INNER_KINDS[case.kind](inner, self.ddp, self.zero, **case.hook)
        else:
            self.hook = zero_step_hook(self.ddp, self.zero, **case.hook)
        self.ddp.register_comm_hook(state, self.hook)

    def iterate(self, number: int) -> float:
        """Run one iteration and return the loss; gradients are kept."""
        for group in self.zero.param_groups:
            group.update(self.case.hyper.get(number, {}))
        return backward(self.ddp, number, self.case.backwards)


class Alone:
    """Process that computes the gradients of all ranks, and steps by the pure core."""

    def __init__(self, case: Case, module: nn.Module, ranks: int) -> None:
        self.case = case
        self.module = module
        self.ranks = ranks
        self.optimizer = case.oracle or case.optimizer
        # Parameters are in the order of the model, because sums over gradients follow this order.
        # optree would sort the keys of a dict.
        self.params: Named = OrderedDict(
            (name, param) for name, param in module.named_parameters() if param.requires_grad
        )
        self.state = self.optimizer.init(self.params)

    def gradients(self, iteration: int) -> tuple[dict[str, Tensor | None], list[float]]:
        """Return the mean of the ranks' gradients, added in rank order, and the ranks' losses."""
        terms: dict[str, list[Tensor]] = {name: [] for name in self.params}
        losses = []
        used: set[str] = set()
        for rank in range(self.ranks):
            for param in self.params.values():
                param.grad = None
            losses.append(self._backward(rank, iteration))
            for name, param in self.params.items():
                used |= {name} if param.grad is not None else set()
                grad = torch.zeros_like(param) if param.grad is None else param.grad
                terms[name].append(grad / self.ranks)
        total = {name: _sum(own) if name in used else None for name, own in terms.items()}
        return total, losses

    def _backward(self, rank: int, iteration: int) -> float:
        parts, total = self.case.backwards, 0.0
        for part in range(parts):
            loss = twins.loss_of(self.module, rank, iteration, part) / parts
            loss.backward()
            total += loss.item()
        return total

    def step(self, gradients: Mapping[str, Tensor | None], number: int) -> None:
        if number in self.case.hyper:
            self.optimizer = self.optimizer.replace(**self.case.hyper[number])
        with torch.no_grad():
            grads = OrderedDict((name, gradients[name]) for name in self.params)
            params, self.state = self.optimizer.update(self.params, grads, self.state)
            for name, param in self.params.items():
                param.copy_(params[name])


def _sum(terms: list[Tensor]) -> Tensor:
    if terms[0].dtype in (torch.bfloat16, torch.float16):
        return functools.reduce(torch.add, [one.float() for one in terms]).to(terms[0].dtype)
    return functools.reduce(torch.add, terms)


def pair(case: Case, group: dist.ProcessGroup | None = None) -> tuple[Run, Alone]:
    """Return a run and one process with equal parameters."""
    module = fresh(case.model)
    twin = copy.deepcopy(module)
    run = Run(case, module, group)
    return run, Alone(case, twin, run.group.size())


def compare(case: Case, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Compare a run with one process in each iteration, bit for bit."""
    run, alone = pair(case, group)
    rank = run.group.rank()
    seen: dict[str, Any] = {"differences": [], "apart": [], "losses": [], "moved": []}
    for number in range(case.iterations):
        before = comparison.copied(run.ddp)
        loss = run.iterate(number)
        gradients, losses = alone.gradients(number)
        if case.kind in INNER_KINDS:
            # The order in which an inner hook adds is unknown, so one process steps by its result.
            found = dict(run.ddp.module.named_parameters())
            gradients = {
                name: None if unused is None else found[name].grad.clone()
                for name, unused in gradients.items()
            }
        alone.step(gradients, number)
        run.ddp.zero_grad()
        seen["losses"].append(loss == losses[rank])
        seen["differences"].append(different(run, alone))
        seen["apart"].append(apart(run, alone))
        seen["moved"].append(len(comparison.moved(before, run.ddp)))
    seen["digest"] = comparison.digest(run.ddp.module.parameters())
    seen["finite"] = comparison.finite(run.ddp.module.parameters())
    seen["norm"] = None if run.hook.norm is None else run.hook.norm.item()
    return seen


def apart(run: Run, alone: Alone) -> float:
    """Return the largest difference of a parameter, relative to its largest element."""
    params = dict(run.ddp.module.named_parameters())
    with torch.no_grad():
        return max(
            float((params[name] - wanted).abs().max() / wanted.abs().max())
            for name, wanted in alone.params.items()
            if wanted.numel()
        )


def different(run: Run, alone: Alone) -> list[str]:
    """Return the parameters that differ in any bit."""
    params = dict(run.ddp.module.named_parameters())
    return [
        name
        for name, wanted in alone.params.items()
        if not torch.equal(params[name].detach(), wanted.detach())
    ]
