"""Job of each rank in a case: training, compared with one process."""

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hooks import hook_with_zero_step, hook_with_zero_step_interleaved, zero_step_hook
from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld
from sharding.transport.local_group import LocalGroup
from tests.ddp import comparison, through_memory, torch_side
from tests.zero_local.compare import differing, same

from .cases import OPTIMIZERS, POLICIES, Case, of_json
from .model import Model
from .one_process import Alone, added, grouped, options_of


def in_rank_order(group: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """Reduce a whole bucket to the mean, in rank order as ``zero_step_hook`` does."""
    buffer, size = bucket.buffer(), group.size()
    own = buffer / size
    every = [torch.empty_like(own) for _ in range(size)]
    work = dist.all_gather(every, own, group=group, async_op=True)
    assert work is not None
    found: Future[Tensor] = work.get_future().then(lambda _: buffer.copy_(added(every)))
    return found


class Run:
    """DDP module with its optimizer and its hook."""

    def __init__(self, case: Case, module: Model, group: dist.ProcessGroup | None) -> None:
        self.case = case
        self.ddp = DistributedDataParallel(
            module,
            process_group=group,
            bucket_cap_mb=case.cap,
            find_unused_parameters=case.unused,
            static_graph=case.static,
            gradient_as_bucket_view=case.bucket_view,
        )
        self.group = self.ddp.process_group
        self.rank = self.group.rank()
        self.stepped: list[list[tuple[str, int, int]]] = []

    def register(self) -> None:
        """Create the optimizer and the hook; each may raise an error."""
        case, made = self.case, OPTIMIZERS[self.case.optimizer]
        self.numbers, groups = grouped(case, self.ddp.module, made.oracle)
        self.zero = ZeroRedundancyOptimizer(
            groups,
            made.given,
            process_group=self.group,
            overlap_with_ddp=case.overlap,
            parameters_as_bucket_view=case.param_view,
            policy=POLICIES[case.policy](case.ranks),
            executor=case.executor,
            **made.options,
        )
        state: Any = None
        if case.hook == "scatter":
            self.hook = zero_step_hook(self.ddp, self.zero)
        else:
            state, inner = self._inner()
            held = case.hook == "held"
            make = hook_with_zero_step if held else hook_with_zero_step_interleaved
            self.hook = make(inner, self.ddp, self.zero)
        self.ddp.register_comm_hook(state, self.hook)

    def _inner(self) -> Any:
        if self.case.inner == "ordered":
            return self.group, in_rank_order
        return torch_side.INNER[self.case.inner](self.group)

    def iterate(self, iteration: int) -> float:
        """Run one iteration and return the loss; gradients are kept."""
        oracle = OPTIMIZERS[self.case.optimizer].oracle
        for number, group in zip(self.numbers, self.zero.param_groups, strict=True):
            group.update(options_of(self.case, oracle, number, iteration))
        parts, total = self.case.parts(iteration), 0.0
        with mock.patch.object(self.zero, "step_owned", self._noting()):
            for part in range(parts):
                with nullcontext() if part == parts - 1 else self.ddp.no_sync():
                    loss = self.ddp(self.rank, iteration, part) / parts
                    loss.backward()
                    total += loss.item()
        return total

    def _noting(self) -> Callable[..., None]:
        step = self.zero.step_owned
        self.stepped.append([])

        def noted(asked: Mapping[str, Any], **more: Any) -> None:
            self.stepped[-1] += [(path, a, b) for path, own in asked.items() for a, b, _ in own]
            step(asked, **more)

        return noted


def run_case(case: dict[str, Any]) -> Any:
    """Run a case on the rank of this process; return None if this rank does not train."""
    told = of_json(case)
    with through_memory.through_memory() if told.memory else nullcontext():
        group = None if told.members is None else dist.new_group(list(told.members))
        if told.members is not None and dist.get_rank() not in told.members:
            return None
        return run_on(group, told)


def run_locally(case: Case) -> list[Any]:
    """Run a case whose ranks are threads of this process; return the result of each."""

    def run(group: LocalGroup) -> Any:
        if case.members is None:
            return run_on(group, case)
        if group.rank() not in case.members:
            return None
        return run_on(group.split(case.members), case)

    return LocalWorld(case.world).run(run)


def run_on(group: dist.ProcessGroup | None, told: Case) -> Any:
    """Run a case on one rank; return its error, or its differences from one process."""
    module = Model(told)
    twin = copy.deepcopy(module)
    run = Run(told, module, group)
    try:
        run.register()
    except (TypeError, ValueError) as error:
        return {
            "refused": f"{type(error).__name__}: {error}",
            "changed": unequal(module, twin) + left_behind(module),
        }
    return {"refused": None, **train(run, Alone(told, twin))}


def train(run: Run, alone: Alone) -> dict[str, Any]:
    """Train beside one process; return the differences of each iteration, bit for bit."""
    case, module = run.case, run.ddp.module
    seen: dict[str, Any] = {"differences": [], "losses": [], "gradients": []}
    for iteration in range(case.iterations):
        loss = run.iterate(iteration)
        gradients, losses = alone.gradients(iteration)
        alone.step(gradients, iteration)
        seen["losses"].append(loss == losses[run.rank])
        seen["differences"].append(unequal(module, alone.module))
        if case.hook != "scatter":
            seen["gradients"].append(wrong_gradients(module, gradients))
        run.ddp.zero_grad()
    seen["digest"] = comparison.digest(module.parameters())
    seen["finite"] = comparison.finite(module.parameters())
    seen["stepped"], seen["used"] = run.stepped, alone.used
    seen["sizes"] = {name: param.numel() for name, param in alone.params.items()}
    seen["state"] = wrong_state(run, alone)
    return seen


def unequal(module: nn.Module, wanted: nn.Module) -> list[str]:
    """Return the parameters that differ in any bit, including frozen ones and ones outside ZeRO."""
    return differing(dict(module.named_parameters()), dict(wanted.named_parameters()))


def wrong_gradients(module: nn.Module, wanted: Mapping[str, Tensor | None]) -> list[str]:
    """Return the parameters whose gradients differ from those of one process."""
    return [
        name
        for name, param in module.named_parameters()
        if wanted.get(name) is not None
        and (param.grad is None or not torch.equal(param.grad, wanted[name]))
    ]


def left_behind(module: nn.Module) -> list[str]:
    """Return the hooks that remain on the module and its parameters."""
    parts = [one for one in module.modules() if one._forward_pre_hooks or one._state_dict_pre_hooks]
    params = [name for name, one in module.named_parameters() if one._backward_hooks]
    return [f"hooks on {one}" for one in (*parts, *params)]


def wrong_state(run: Run, alone: Alone) -> list[str]:
    """Return the entries of collected state that differ from one process. Collective."""
    run.zero.consolidate_state_dict()
    if run.rank:
        return []
    state = run.zero.state_dict()["state"]
    wrong = []
    for number, name in enumerate(run.zero.params):
        if name in alone.params:
            found, wanted = state.get(number, {}), alone.entries(name)
            steps = sum(name in used for used in alone.used)
            wrong += [f"{name}: {key}" for key in odd_entries(found, wanted, steps)]
    return wrong


def odd_entries(found: Mapping[str, Any], wanted: dict[str, Tensor], steps: int) -> list[str]:
    """Return the entries that differ; a parameter without steps needs no entries."""
    odd = [] if int(wanted.pop("step")) == int(found.get("step", steps)) == steps else ["step"]
    odd += [key for key in found if key != "step" and key not in wanted]
    if steps:
        odd += [key for key in wanted if found.get(key) is None]
    both = [key for key in wanted if found.get(key) is not None]
    return odd + [key for key in both if not same(found[key], wanted[key])]
