"""Lifetime of a process group after its hook has dropped it."""

import os
import threading
import weakref

import pytest
import torch.distributed as dist

from hooks import group_lifetime
from hooks.group_lifetime import keep_group_alive


class Owner:
    """Owner of a process group."""


def test_it_is_freed_in_another_thread_some_time_later(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = threading.Event()
    monkeypatch.setattr(group_lifetime, "SECONDS", 0.5)
    threads: list[str] = []

    def note() -> None:
        threads.append(threading.current_thread().name)
        freed.set()

    group = dist.ProcessGroup(0, 1)
    weakref.finalize(group, note)
    owner = Owner()
    keep_group_alive(owner, group)
    del group, owner
    assert not freed.wait(0.1)  # threads of gloo can still be at work
    assert freed.wait(120)
    assert threads != [threading.current_thread().name]


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
