"""Counts of the plans, programs and memory that a step makes, and should reuse."""

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from functional_optim.kernels import foreach
from functional_optim.kernels.exact import kernel
from functional_optim.native import cache
from functional_optim.plan import StepPlan

NUMBER = 8
"""Bytes of a 0-d tensor, which torch makes for an added number."""

MAKERS: tuple[tuple[Any, str], ...] = (
    (kernel, "_made"),
    (foreach, "list_program"),
    (cache, "library"),
    (torch, "compile"),
    (torch.jit, "script"),
)
"""Functions that make programs."""


class Made(NamedTuple):
    """Plans, programs and memory that some steps make."""

    plans: int
    programs: list[str]
    """The name of the maker of each program."""
    largest: int
    """Bytes of the largest allocation of torch on the CPU."""


NOTHING = Made(0, [], NUMBER)


def made_by(*steps: Callable[[], object]) -> Made:
    """Return the plans, programs and memory that steps make, run one after another."""
    plans: list[None] = []
    programs: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(_counted(StepPlan, "__init__", partial(plans.append, None)))
        for owner, name in MAKERS:
            stack.enter_context(_counted(owner, name, partial(programs.append, name)))
        sizes = _allocations(steps)
    return Made(len(plans), programs, max([NUMBER, *sizes]))


def peak_of(step: Callable[[], object]) -> int:
    """Return the largest number of bytes of torch on the CPU that a step allocates at a time."""
    return max([0, *accumulate(_allocations([step]))])


def _allocations(steps: Iterable[Callable[[], object]]) -> list[int]:
    """Return the bytes of each allocation that steps make, in order; negative where they free."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        for step in steps:
            step()
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]  # it has ended
    events = [event for event in events if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def every_call_of(step: Callable[[], object]) -> int:
    """Count the calls of Python functions, including those of torch."""
    found = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal found
        found += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return found


def calls_of(step: Callable[[], object], package: str = "functional_optim") -> int:
    """Count the calls of our functions, and the items of our generators.

    Args:
        step: function to call.
        package: package whose functions are counted.
    """
    found = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and f"/{package}/" in frame.f_code.co_filename:
            found.append(frame.f_code.co_name)

    gc.disable()  # finalizers of garbage of earlier tests are not calls of the step
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(found)


def noted_calls(monkeypatch: pytest.MonkeyPatch, places: Sequence[tuple[Any, str]]) -> list[str]:
    """Record the names of functions when they are called; each is given as (owner, name)."""
    found: list[str] = []

    def noting(name: str, before: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any, **options: Any) -> Any:
            found.append(name)
            return before(*given, **options)

        return called

    for owner, name in places:
        monkeypatch.setattr(owner, name, noting(name, getattr(owner, name)))
    return found


@contextmanager
def _counted(owner: Any, name: str, note: Callable[[], object]) -> Iterator[None]:
    before = getattr(owner, name)

    def noted(*given: Any, **options: Any) -> Any:
        note()
        return before(*given, **options)

    with mock.patch.object(owner, name, noted):
        yield
