"""Packs: small leaves that are brought together and stepped as one chunk of memory, and back.

It costs less than to step each of them by torch's operations, alone or in lists, where no loop is
compiled. Floats of 16 bits are packed nowhere: torch's kernels for them round the last elements of
a tensor, past its last whole vector, in another way.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch import foreach_copy_
from functional_optim.core.brief import and_more
from functional_optim.core.leaf import Leaf, Scalars
from functional_optim.core.stage import Stage
from functional_optim.kernels.chunks import as_chunk, with_tensors
from functional_optim.kernels.kernel import BindChunk, Call
from functional_optim.kernels.scratch import scratch, views_of_scratch

LARGE = 1 << 16
"""Elements from which a leaf is a chunk of its own: the call is then cheap beside the work."""

PACK = 1 << 20
"""Most elements that are packed into one chunk."""


class _Run:
    """Leaves that follow each other in lists, and are packed into one chunk."""

    def __init__(self, start: int, stop: int) -> None:
        self.own = slice(start, stop)
        self.entries: dict[Any, Any] = {}
        """What kernels keep of the chunk."""


class _Memory(NamedTuple):
    """Memory in which leaves are brought together."""

    chunk: Leaf
    """All of them as one leaf."""
    parts: list[list[Tensor]]
    """For each list, the parts of the chunk's tensor that are the leaves', laid out as these."""


def bind_packs(
    bind: BindChunk,
    stages: Sequence[Stage],
    like: Leaf,
    columns: Sequence[list[Tensor]],
    totals: Sequence[Tensor],
) -> Call:
    """Bind a step of leaves given as lists of tensors.

    Args:
        bind: gives the step of a chunk.
        stages: of the chain, all pointwise.
        like: one of the leaves as a chunk, with the numbers of the step.
        columns: all parameters, all gradients, and all of each tensor of the state; those of a leaf
            have one shape and layout, and fill their memory.
        totals: the sum of each measured stage.

    Raises:
        KernelError: the executor asked for does not step them.
        NotPointwiseError: a stage only says that it is pointwise.
    """
    entries = {} if like.entries is None else like.entries
    runs = entries.get("packs")
    if runs is None:
        bind(stages, like, totals)  # refused before any is stepped
        cut = runs_of(list(map(Tensor.numel, columns[0])), PACK)
        runs = entries["packs"] = [_Run(*one) for one in cut]
    return partial(_step_runs, bind, stages, like, columns, totals, runs)


def bind_each(
    bind: BindChunk,
    stages: Sequence[Stage],
    like: Leaf,
    columns: Sequence[list[Tensor]],
    totals: Sequence[Tensor],
) -> Call:
    """Bind a step of leaves given as lists of tensors, one by one: see :func:`bind_packs`."""
    chunks = [as_chunk(with_tensors(like, row)) for row in zip(*columns, strict=True)]
    calls = [bind(stages, one._replace(entries=None), totals) for one in chunks if one is not None]

    def step() -> None:
        for call in calls:
            call()

    return step


def _step_runs(
    bind: BindChunk,
    stages: Sequence[Stage],
    like: Leaf,
    columns: Sequence[list[Tensor]],
    totals: Sequence[Tensor],
    runs: Sequence[_Run],
) -> None:
    for run in runs:
        own = [column[run.own] for column in columns]
        if len(own[0]) == 1:
            leaf = as_chunk(with_tensors(like, [one for (one,) in own]))
            assert leaf is not None, "it fills its memory"
            bind(stages, leaf._replace(entries=run.entries), totals)()
            continue
        if like.scalars is Scalars.DEVICE:  # what captures a step goes on using the memory
            chunk, parts = _memory(like, own, _new)
        else:
            chunk, parts = views_of_scratch(run, partial(_memory, like, own, scratch))
        for part, column in zip(parts, own, strict=True):
            foreach_copy_(part, column)
        name = and_more(like.name, len(own[0]) - 1)
        leaf = like._replace(
            param=chunk.param,
            grad=chunk.grad,
            states=chunk.states,
            name=name,
            entries=run.entries,
        )
        bind(stages, leaf, totals)()
        for place, (column, part) in enumerate(zip(own, parts, strict=True)):
            if place != 1:  # the gradient is only read
                foreach_copy_(column, part)


def _memory(
    like: Leaf,
    columns: Sequence[list[Tensor]],
    memory: Callable[[Any, int, torch.dtype, torch.device], Tensor],
) -> _Memory:
    """Return memory for the leaves in these lists.

    Args:
        like: one of them.
        columns: a list for each tensor of a leaf.
        memory: gives a piece, by a name of its own.
    """
    sizes = list(map(Tensor.numel, columns[0]))
    pieces: list[Tensor] = []
    every: list[list[Tensor]] = []
    for place, column in enumerate(columns):
        piece = memory(("pack", place), sum(sizes), column[0].dtype, column[0].device)
        parts = zip(piece.split_with_sizes(sizes), column, strict=True)
        pieces.append(piece)
        every.append([part.as_strided(one.shape, one.stride()) for part, one in parts])
    chunk = with_tensors(like, pieces)
    return _Memory(chunk._replace(coefficients=(), hypers=(), entries=None), every)


def _new(_: Any, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=dtype, device=device)


def runs_of(lengths: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return where lists are cut, so that a run has at most so many elements, or is one leaf."""
    if sum(lengths) <= most:
        return [(0, len(lengths))]
    found, start, count = [], 0, 0
    for place, length in enumerate(lengths):
        if count and count + length > most:
            found.append((start, place))
            start, count = place, 0
        count += length
    return [*found, (start, len(lengths))]
