"""Detection of gloo threads that still hold what they called.

A callback of a collective runs in a thread of gloo, and is freed there, with Python's lock, some
time after whoever waited for the collective was told. Nothing in torch says when. The kernel does:
a thread that waits for work sleeps, and goes on sleeping. One that waits for Python's lock wakes up
every few milliseconds to ask for it, and one that waits for a processor does not sleep.

A thread is called as the one that has started it: who looks may have been started in a thread of
gloo, and is none of them.
"""

import threading
import time
from pathlib import Path
from typing import NamedTuple

NAME = "pt_gloo_runloop"
"""What torch calls the threads."""

APART = 0.03
"""Seconds between two looks: several times as long as a thread waits before it asks again."""

UNSEEN = 0.2
"""For how many seconds they are given time where the kernel does not show them."""

_TASKS = Path("/proc/self/task")

_LOOKING: set[str] = set()
"""The threads that look, by their numbers."""


class _Look(NamedTuple):
    asleep: bool
    slept: str
    """How many times it has gone to sleep so far."""


def await_rest(seconds: float) -> None:
    """Return when each of gloo's threads has been seen to wait for work.

    Threads that are started meanwhile are not waited for. Without threads it returns at once.

    Args:
        seconds: the longest it takes.
    """
    if not _TASKS.is_dir():
        time.sleep(min(UNSEEN, seconds))
        return
    own = str(threading.get_native_id())
    _LOOKING.add(own)
    try:
        _await(time.monotonic() + seconds)
    finally:
        _LOOKING.discard(own)


def _await(until: float) -> None:
    restless = _looks()
    while restless and time.monotonic() < until:
        time.sleep(APART)
        now = _looks()
        restless = {
            thread: now[thread]
            for thread, before in restless.items()
            if thread in now
            and thread not in _LOOKING
            and not (before.asleep and before == now[thread])
        }


def _looks() -> dict[str, _Look]:
    """Return what each of gloo's threads is doing."""
    looks = {}
    for task in _TASKS.iterdir():
        if task.name in _LOOKING:
            continue
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:
            continue  # it has ended
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if fields.get("Name") == NAME:
            asleep = fields["State"].startswith("S")
            looks[task.name] = _Look(asleep, fields.get("voluntary_ctxt_switches", ""))
    return looks
