"""A group that is destroyed right after a backward pass, with all that communicated over it."""

import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch.distributed as dist

from hooks import group_lifetime
from hooks.group_lifetime import outlive

PROGRAM = """
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from functional_optim import sgd
from hooks import (
    OptimizerState,
    group_lifetime,
    hook_with_zero_step,
    step_hook,
    zero_step_hook,
)
from sharding import ZeroRedundancyOptimizer
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook


def once(kind):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(torch.nn.Linear(4, 1))
    if kind == "step_hook":
        state = OptimizerState(sgd(lr=0.1), ddp)
        ddp.register_comm_hook(None, step_hook(state))
    else:
        zero = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
        )
        if kind == "zero_step_hook":
            ddp.register_comm_hook(None, zero_step_hook(ddp, zero))
        else:
            hook = hook_with_zero_step(allreduce_hook, ddp, zero)
            ddp.register_comm_hook(ddp.process_group, hook)
    for _ in range(2):
        ddp(torch.ones(2, 4)).sum().backward()
        ddp.zero_grad()
    dist.destroy_process_group()


group_lifetime.SECONDS = float(sys.argv[3])
for _ in range(int(sys.argv[2])):
    once(sys.argv[1])
print("done")
"""


STARVED = """
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from functional_optim import sgd
from hooks import OptimizerState, step_hook

for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), {int(sys.argv[2])})
there = set(os.listdir("/proc/self/task"))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = DistributedDataParallel(torch.nn.Linear(4, 1))
ddp.register_comm_hook(None, step_hook(OptimizerState(sgd(lr=0.1), ddp)))
ddp(torch.ones(2, 4)).sum().backward()  # whatever takes long the first time
ddp.zero_grad()
loss = ddp(torch.ones(2, 4)).sum()
for thread in set(os.listdir("/proc/self/task")) - there:
    os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
loss.backward()
if sys.argv[1] == "destroyed":
    dist.destroy_process_group()
"""


class Owner:
    """What has a group."""


KINDS = ["step_hook", "zero_step_hook", "hook_with_zero_step"]


def program_ends_well(kind: str, groups: int, seconds: float) -> None:
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, str(groups), str(seconds)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    assert made.stdout == "done\n"


@pytest.mark.parametrize("kind", KINDS)
def test_it_can_be_destroyed_at_once(kind: str) -> None:
    """Over and over: where a thread of gloo is in the middle of something is a matter of luck."""
    program_ends_well(kind, 100, group_lifetime.SECONDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_may_end_while_groups_are_freed(kind: str) -> None:
    """Their turn comes while the program makes more of them, so some are freed when it ends."""
    program_ends_well(kind, 30, 0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are made to wait by Linux's scheduler")
@pytest.mark.parametrize("group", ["destroyed", "left"])
def test_a_program_may_end_before_the_threads_of_gloo_are_done(group: str) -> None:
    """They get a processor only when nobody else wants it, and somebody always does."""
    cpu = min(os.sched_getaffinity(0))
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(busy.pid, {cpu})
        made = subprocess.run(
            [sys.executable, "-c", STARVED, group, str(cpu)],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    finally:
        busy.kill()
        busy.wait()
    assert made.returncode == 0, made.stderr[-2000:]


def test_it_is_freed_in_another_thread_some_time_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_lifetime, "SECONDS", 0.2)
    freed: list[str] = []
    group = dist.ProcessGroup(0, 1)
    weakref.finalize(group, lambda: freed.append(threading.current_thread().name))
    owner = Owner()
    outlive(owner, group)
    del group, owner
    assert freed == []
    until = time.monotonic() + 20.0
    while not freed and time.monotonic() < until:
        time.sleep(0.02)
    assert len(freed) == 1
    assert freed[0] != threading.current_thread().name


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # from Python 3.12 on
def test_a_forked_process_does_not_wait_for_whoever_frees_a_group_in_its_parent() -> None:
    with group_lifetime._FREEING:
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(0 if group_lifetime._FREEING.acquire(blocking=False) else 1)
            finally:
                os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
