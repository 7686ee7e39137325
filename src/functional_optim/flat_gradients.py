"""The gradients of a flat layout: buffers that autograd adds to, or that gradients are copied to.

Everything that is done at each step is a loop in C: with many small parameters, Python per
parameter would take longer than the step itself.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate, pairwise
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.checks import check_grad
from functional_optim.flat_buffer import FlatBuffer, difference, rows
from functional_optim.huge_pages import ask_for_huge_pages
from functional_optim.native import LOOPS
from functional_optim.places import PLAIN, Places, kinds_of
from functional_optim.untouched import untouched_zeros

SHARED = 1 << 20
"""Elements from which ``torch.cat`` is shared among threads."""


class Run(NamedTuple):
    """Neighbours in a buffer that are one matrix to ``torch.cat``."""

    members: slice
    """Which of the layout's parameters, in the order of its buffers."""
    out: Tensor
    """The stretch of the gradient buffer, of as many columns as each of them has."""
    starts: list[int]
    """The row of it at which each member begins, and one past the last."""


class _Calls(NamedTuple):
    """What copies gradients into the buffers."""

    runs: list[Run]
    singles: list[int]
    """Members that are in no run."""
    single_views: list[Tensor]
    """Where those belong."""
    places: dict[Any, Any]
    """What the loops in C++ remember of their views, under the memory of the buffers."""


class FlatGradients:
    """Gradient buffers beside the buffers of parameters.

    Args:
        buffers: the buffers of the layout.
        params: the parameters in them, in the order of the segments.
        order: the place of each of them in the list that the layout was given.
        given: how many parameters the layout was given.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        params: Sequence[Tensor],
        order: Sequence[int],
        given: int,
    ) -> None:
        self.params = params
        self.order = order
        self.given = given
        self.names = [segment.name for buffer in buffers for segment in buffer.segments]
        with torch.inference_mode(mode=False), torch.no_grad():
            self.buffers = [untouched_zeros(buffer.data) for buffer in buffers]
            views = [
                view
                for buffer, flat in zip(buffers, self.buffers, strict=True)
                for view in buffer.views(flat)
            ]
            self.views = [
                like(param, view).detach() for param, view in zip(params, views, strict=True)
            ]
            self._in_order = list(order) == list(range(given))
        self._parts = buffers
        self._calls = self._find_calls()
        self.kinds = kinds_of(self.views)
        self.places = Places(self.views)
        self._expected = False
        self.starts = {view.data_ptr() for view in self.views if view.numel()}

    def _find_calls(self) -> "_Calls":
        """What copies all gradients."""
        runs = self._find_runs()
        done = {i for run in runs for i in range(len(self.params))[run.members]}
        singles = [i for i in range(len(self.params)) if i not in done]
        return _Calls(runs, singles, [self.views[i] for i in singles], {})

    def _find_runs(self) -> list[Run]:
        """Stretches of at least two neighbours with equal rows and no gap between them."""
        runs = []
        first = 0
        for buffer, flat in zip(self._parts, self.buffers, strict=True):
            segments = buffer.segments
            columns = [rows(self.views[first + k]) for k in range(len(segments))]
            begin = 0
            for end in range(1, len(segments) + 1):
                last = segments[end - 1]
                goes_on = (
                    end < len(segments)
                    and columns[end] == columns[begin]
                    and segments[end].offset == last.offset + last.numel
                )
                if goes_on:
                    continue
                row = columns[begin]
                if row is not None and end - begin > 1:
                    stretch = flat[segments[begin].offset : last.offset + last.numel]
                    out = stretch.view(-1, *row)
                    lengths = [self.views[first + place].shape[0] for place in range(begin, end)]
                    starts = list(accumulate(lengths, initial=0))
                    runs.append(Run(slice(first + begin, first + end), out, starts))
                begin = end
            first += len(segments)
        return runs

    def expect(self) -> None:
        """All of the buffers will be in use, not only what lies between long gradients."""
        if not self._expected:
            self._expected = True
            for flat in self.buffers:
                ask_for_huge_pages(flat)

    def attach(self) -> None:
        """Make the views the gradients of their parameters; what was accumulated is kept."""
        pairs = [
            (param, view)
            for param, view in zip(self.params, self.views, strict=True)
            if param.requires_grad
        ]
        for name, param in zip(self.names, self.params, strict=True):
            if param.requires_grad and param.grad is not None:
                _require_plain(param, param.grad, name)
        self.expect()
        with torch.no_grad():
            for param, view in pairs:
                if param.grad is None:
                    view.zero_()
                elif difference(param.grad, view) is not None:
                    view.copy_(param.grad)
                # Another object: what is done to the gradient must not change what it is held to.
                param.grad = view.detach()

    def zero(self) -> None:
        """Fill the buffers with zeros."""
        self.expect()
        with torch.no_grad():
            for flat in self.buffers:
                flat.zero_()

    def of_members(self, grads: Sequence[Any]) -> list[Any]:
        """The gradients of the parameters in buffers, in the order of the segments."""
        if len(grads) != self.given:
            raise ValueError(
                f"grads has length {len(grads)}, but the layout was given {self.given} "
                "parameters: one gradient for each, in the same order"
            )
        if self._in_order and isinstance(grads, list):
            return grads
        return list(map(grads.__getitem__, self.order))

    def in_place(self, grads: Sequence[Any]) -> bool:
        """Whether the gradients of all parameters in buffers are the views."""
        mine = self.of_members(grads)
        with torch._C.DisableTorchFunction():  # noqa: SLF001  torch has no public name
            for grad, view in zip(mine[:1], self.views, strict=False):  # it tells, most of the time
                if type(grad) not in PLAIN or difference(grad, view) is not None:
                    return False
            if not PLAIN.issuperset(map(type, mine)):
                return False
            if self.places.hold(mine):
                return True
        pairs = zip(mine, self.views, strict=True)
        return all(difference(grad, view) is None for grad, view in pairs)

    def gather(self, grads: Sequence[Any]) -> None:
        """Copy gradients into the buffers."""
        if self.gather_at_once(grads):
            return
        mine, calls = self.of_members(grads), self._calls
        # A mode such as that of torch.set_default_device would run Python at every call.
        with torch._C.DisableTorchFunction(), torch.no_grad():  # noqa: SLF001  torch has no public name
            addresses = self._addresses(mine)
            if addresses is None:
                for param, grad, name in zip(self.params, mine, self.names, strict=True):
                    _require_plain(param, grad, name)
            elif not self.starts.isdisjoint(addresses):
                mine = self._away_from_buffers(mine)
            for run in calls.runs:
                _concatenate(mine[run.members], run)
            singles = list(map(mine.__getitem__, calls.singles))
            if singles:
                torch._foreach_copy_(calls.single_views, singles)

    def gather_at_once(self, grads: Sequence[Any]) -> bool:
        """The same by the loops in C++; whether it was done."""
        loops = LOOPS.get(len(self.params))
        if loops is None:
            return False
        mine, calls = self.of_members(grads), self._calls
        self.expect()
        # A mode such as that of torch.set_default_device would run Python at every call.
        with torch._C.DisableTorchFunction():  # noqa: SLF001  torch has no public name
            memory = tuple((one.data_ptr(), one.untyped_storage().nbytes()) for one in self.buffers)
            if memory not in calls.places:
                calls.places.clear()
                calls.places[memory] = loops.remember(self.views)
            places = calls.places[memory]
            # A list of our own: nobody can take a gradient away while it is copied without the GIL.
            mine = list(mine)
            if places is None or not loops.copy(places, mine, torch.get_num_threads()):
                return False
            loops.bump(self.buffers)
            return True

    def _addresses(self, mine: list[Any]) -> list[int] | None:
        """Where the gradients begin in memory; None if one of them does not fit its place."""
        if not PLAIN.issuperset(map(type, mine)):
            return None
        try:
            fit = self.places.alike(mine) or kinds_of(mine) == self.kinds
            return list(map(Tensor.data_ptr, mine)) if fit else None
        except RuntimeError:  # a sparse gradient
            return None

    def _away_from_buffers(self, mine: list[Tensor]) -> list[Tensor]:
        """The gradients, copied where they lie in the buffers that they are to be copied to."""
        memory = {flat.untyped_storage().data_ptr() for flat in self.buffers}
        return [
            grad.clone() if grad.untyped_storage().data_ptr() in memory else grad for grad in mine
        ]


def _concatenate(tensors: list[Tensor], run: Run) -> None:
    """``torch.cat``, which copies in one thread, in as many threads as torch computes with."""
    out = run.out
    parts = torch.get_num_threads() if out.numel() >= SHARED and out.device.type == "cpu" else 1
    cuts = [len(tensors) * part // parts for part in range(parts + 1)]
    *others, own = [
        (tensors[first:last], out[run.starts[first] : run.starts[last]])
        for first, last in pairwise(cuts)
        if first < last
    ]
    copies = [_copiers().submit(_cat, *one) for one in others]
    _cat(*own)
    for copy in copies:
        copy.result()


def _cat(tensors: list[Tensor], out: Tensor) -> None:
    with torch._C.DisableTorchFunction(), torch.no_grad():  # noqa: SLF001  both are a thread's own
        torch.cat(tensors, out=out)


@lru_cache(maxsize=1)
def _copiers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), "gather", _compute_alone)


def _compute_alone() -> None:
    """Let torch compute in this thread without helpers.

    They would be threads of OpenMP beside those of the main thread. Once there are more of them
    than processors, they no longer wait for work in a loop but sleep, in the main thread's teams
    too: every short operation of the process would take several times as long from then on.
    """
    threads = torch.get_num_threads()  # asked for first: it would be set later, when first needed
    torch.set_num_threads(1)
    # That is of this thread alone, but also what torch gives to threads to come.
    restore = Thread(target=torch.set_num_threads, args=(threads,))
    restore.start()
    restore.join()


os.register_at_fork(after_in_child=_copiers.cache_clear)  # where the threads are not


def like(param: Tensor, view: Tensor) -> Tensor:
    """A real view of a buffer as its parameter sees it."""
    return torch.view_as_complex(view) if param.is_complex() else view


def _require_plain(param: Tensor, grad: Any, name: str) -> None:
    """A gradient that can be copied into a buffer."""
    if grad is None:
        raise ValueError(
            f"the gradient at {name!r} is missing, but a flat buffer is stepped whole: give zeros "
            "if that is what is meant, or keep the parameter out of the layout"
        )
    check_grad(param, grad, name)
    if grad.layout != torch.strided or type(grad) not in PLAIN:
        raise ValueError(
            f"the gradient at {name!r} is a {type(grad).__name__} with layout {grad.layout}; a "
            "flat buffer takes dense tensors: give grad.to_dense(), or keep the parameter out of "
            "the layout"
        )
