"""Leaves that need their whole tensors, bound to what steps them: stacks and programs.

What was found out once stays: which leaves are stepped together, and by which program. A step then
computes the scalars of each program once, and calls it for each stack and each leaf alone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.capturing import check_not_captured
from functional_optim.core.leaf import Leaf
from functional_optim.core.stage import Stage
from functional_optim.kernels.cache_key import CacheKey, key_of
from functional_optim.kernels.chunks import ALIGNMENT, with_tensors
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.kernel import Part
from functional_optim.kernels.signature import Numbers
from functional_optim.kernels.stacked import (
    StackedExecutor,
    columns_of,
    stacks_of,
    step_columns,
)
from functional_optim.kernels.whole import Known, program_of

_Rows = Sequence[Callable[[Sequence[Tensor]], tuple[Tensor, ...]]]
"""For each leaf, what takes its tensors out of a list: parameter, gradient, state."""


class _Bound(NamedTuple):
    """Division of leaves into stacks, and their programs. It holds no tensor."""

    key: CacheKey
    threads: int
    settled: bool
    """Whether the same leaves will be stepped in the same way from now on."""
    alone: list[tuple[int, Known]]
    """The positions of leaves that are stepped by themselves, each with its program."""
    together: list[tuple[Sequence[int], Known]]
    """The same of leaves that are stepped as one larger tensor each."""
    programs: list[Known]
    """All of these programs, each once."""


class BoundLeaves:
    """Programs of leaves with coefficients in common, each plain contiguous tensors.

    Args:
        executor: knows which leaves may be stepped together.
        stages: of the chain.
        places: for each leaf, the positions of its tensors in the list of a step.
    """

    def __init__(
        self, executor: StackedExecutor, stages: Sequence[Stage], places: Sequence[Sequence[int]]
    ) -> None:
        self._executor, self._stages = executor, stages
        self._rows: _Rows = [itemgetter(*one) for one in places]
        self._bound: _Bound | None = None

    def parts(
        self, tensors: Sequence[Tensor], like: Leaf, totals: Sequence[Tensor], pointers: bytes
    ) -> list[Part] | None:
        """Bind a step: a call for each part; None where a leaf has no program.

        Args:
            tensors: of this step, with the layouts of the last. Leaves share no memory.
            like: one of the leaves, with entries of its own and the numbers of this step.
            totals: the sum of each measured stage.
            pointers: to all tensors, leaf by leaf.
        """
        if like.param.is_cuda:
            check_not_captured([like.param])
            if any(one % ALIGNMENT for one in memoryview(pointers).cast("q")):
                return None  # a stack would be aligned, and sum up in another order
        try:
            key, numbers, _ = key_of(self._stages, like)
        except UntraceableError:
            return None
        threads, bound = torch.get_num_threads(), self._bound
        if bound is None or not bound.settled or key is not bound.key or threads != bound.threads:
            bound = self._bind(tensors, like, key)
            if bound is None:
                return None
            self._bound = bound
        return self._parts(bound, tensors, numbers, totals)

    def _bind(self, tensors: Sequence[Tensor], like: Leaf, key: CacheKey) -> _Bound | None:
        """Find stacks and programs for the choices of now; None if a leaf has no program."""
        one = like._replace(entries=None)
        leaves = [with_tensors(one, [each.detach() for each in row(tensors)]) for row in self._rows]
        found = self._executor.stacks_of(self._stages, leaves)
        alone: list[tuple[int, Known]] = []
        for place in found.alone:
            known = program_of(self._stages, leaves[place])
            if isinstance(known, str):
                return None
            alone.append((place, known))
        together: list[tuple[Sequence[int], Known]] = []
        for places in found.together:
            columns = columns_of([leaves[k] for k in places])
            known = program_of(self._stages, with_tensors(leaves[places[0]], stacks_of(columns)))
            if isinstance(known, str):
                return None
            together.append((places, known))
        programs = list(dict.fromkeys(known for _, known in [*alone, *together]))
        threads = torch.get_num_threads()
        return _Bound(key, threads, found.settled, alone, together, programs)

    def _parts(
        self,
        bound: _Bound,
        tensors: Sequence[Tensor],
        numbers: Numbers,
        totals: Sequence[Tensor],
    ) -> list[Part]:
        prepared = {
            known: (known.step, known.arguments(numbers, totals)) for known in bound.programs
        }
        found: list[Part] = []
        for k, known in bound.alone:
            step, rest = prepared[known]
            found.append(((k,), partial(step, *self._rows[k](tensors), *rest)))
        for places, known in bound.together:
            own = [self._rows[k](tensors) for k in places]
            columns = list(map(list, zip(*own, strict=True)))
            step, rest = prepared[known]
            found.append((places, partial(_step_together, step, columns, rest)))
        return found


def _step_together(
    step: Callable[..., object], columns: Sequence[list[Tensor]], rest: Sequence[Any]
) -> None:
    """Step leaves in a stack, by the further arguments of its program."""
    step_columns(columns, lambda whole: step(*whole, *rest))
