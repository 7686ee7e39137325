"""Programs that end, or destroy their groups, while threads of gloo are at work.

Each program is a fork of one that has imported torch. It ends as any program does: the interpreter
shuts down. ``test_group_lifetime.py`` runs this module, which prints the programs that fail.
"""

import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # torch.optim imports it: once here, and not in each fork
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from functional_optim import sgd
from hooks import (
    PostLocalSGDState,
    group_lifetime,
    hook_with_zero_step,
    post_localSGD_hook,
    step_hook,
    zero_step_hook,
)
from hooks.averaging.contrib import PowerSGDMemory, power_sgd_hook
from sharding import ZeroRedundancyOptimizer


def by_step_hook(ddp: DistributedDataParallel) -> None:
    step_hook(ddp, sgd(lr=0.1))


def _zero(ddp: DistributedDataParallel) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)


def by_zero_step_hook(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, zero_step_hook(ddp, _zero(ddp)))


def by_hook_with_zero_step(ddp: DistributedDataParallel) -> None:
    hook = hook_with_zero_step(allreduce_hook, ddp, _zero(ddp))
    ddp.register_comm_hook(ddp.process_group, hook)


def by_post_local_sgd_hook(ddp: DistributedDataParallel) -> None:
    state = PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=1)
    ddp.register_comm_hook(state, post_localSGD_hook)


def by_power_sgd_hook(ddp: DistributedDataParallel) -> None:
    memory = PowerSGDMemory(PowerSGDState(None, start_powerSGD_iter=2), ddp)
    ddp.register_comm_hook(memory, power_sgd_hook)


Register = Callable[[DistributedDataParallel], None]
KINDS: tuple[Register, ...] = (
    by_step_hook,
    by_zero_step_hook,
    by_hook_with_zero_step,
    by_post_local_sgd_hook,
    by_power_sgd_hook,
)


def train(register: Register) -> DistributedDataParallel:
    """Train two iterations in a world of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(torch.nn.Linear(4, 1))
    register(ddp)
    for _ in range(2):
        ddp(torch.ones(2, 4)).sum().backward()
        ddp.zero_grad()
    return ddp


def destroyed_at_once(register: Register) -> None:
    """Train and destroy the group many times, because the timing of gloo's threads is random."""
    for _ in range(30):
        train(register)
        dist.destroy_process_group()


def destroyed_first(register: Register) -> None:
    """Destroy the group, then drop DDP, which can be its last owner."""
    for _ in range(30):
        ddp = train(register)
        dist.destroy_process_group()
        del ddp


def ends_while_groups_are_freed(register: Register) -> None:
    """Make groups while others are freed, so that some are freed as the program ends."""
    group_lifetime.SECONDS = 0.05
    for _ in range(15):
        train(register)
        dist.destroy_process_group()


def threads() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def ends_before_threads_are_done(register: Register, *, destroyed: bool) -> None:
    """End while gloo's threads still work: they have low priority beside a busy process."""
    there = threads()
    ddp = train(register)
    loss = ddp(torch.ones(2, 4)).sum()
    for thread in threads() - there:
        os.setpriority(os.PRIO_PROCESS, thread, 19)
    loss.backward()
    if destroyed:
        dist.destroy_process_group()


PROGRAMS: dict[str, Callable[[Register], None]] = {
    "destroyed at once": destroyed_at_once,
    "destroyed first": destroyed_first,
    "ends while groups are freed": ends_while_groups_are_freed,
}
STARVED: dict[str, Callable[[Register], None]] = {
    "destroyed": lambda register: ends_before_threads_are_done(register, destroyed=True),
    "left": lambda register: ends_before_threads_are_done(register, destroyed=False),
}


def busy() -> int:
    """Fork a process that always uses the processor of this one; return its id."""
    pid = os.fork()
    while pid == 0:
        pass
    return pid


def main() -> None:
    programs = [(name, run, kind) for name, run in PROGRAMS.items() for kind in KINDS]
    if sys.platform == "linux":  # its scheduler makes threads wait
        programs += [(name, run, by_step_hook) for name, run in STARVED.items()]
    gc.collect()
    gc.freeze()  # otherwise each program scans the objects of torch at its end
    for name, run, kind in programs:
        rival = 0
        if name in STARVED:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            rival = busy()
        pid = os.fork()
        if pid == 0:
            run(kind)
            return  # the forked program ends here
        _, status = os.waitpid(pid, 0)
        if rival:
            os.kill(rival, signal.SIGKILL)
            os.waitpid(rival, 0)
        if status:
            print(f"{name}, {kind.__name__}: {os.waitstatus_to_exitcode(status)}")  # noqa: T201
    print("done")  # noqa: T201


if __name__ == "__main__":
    main()
