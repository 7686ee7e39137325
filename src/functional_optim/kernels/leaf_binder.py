"""Binder of leaves that need their whole tensors to stacks and programs.

The division into stacks and the programs are kept. Each step computes the scalars of each program
once, and calls the program for each stack and each single leaf.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.graph_capture import check_not_captured
from functional_optim.core.leaf import Leaf
from functional_optim.core.stage import Stage
from functional_optim.kernels.cache_key import CacheKey, key_of
from functional_optim.kernels.chunks import ALIGNMENT, with_tensors
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.kernel import Part
from functional_optim.kernels.leaf_program import LeafProgram, program_of
from functional_optim.kernels.signature import Numbers
from functional_optim.kernels.stacks import columns_of, plan_stacks, stack_columns, step_columns


class _Binding(NamedTuple):
    """Division of leaves into stacks, and their programs. It holds no tensor."""

    key: CacheKey
    threads: int
    is_final: bool
    """True if later steps divide the same leaves in the same way."""
    alone: list[tuple[int, LeafProgram]]
    """The positions of leaves that are stepped alone, each with its program."""
    together: list[tuple[Sequence[int], LeafProgram]]
    """For each stack, the positions of its leaves, and its program."""
    programs: list[LeafProgram]
    """All of these programs, each once."""


class LeafBinder:
    """Binder of leaves with the same coefficients and plain contiguous tensors.

    Args:
        places: for each leaf, the positions of its tensors in the list of a step.
    """

    def __init__(self, stages: Sequence[Stage], places: Sequence[Sequence[int]]) -> None:
        self._stages = stages
        self._getters: list[Callable[[Sequence[Tensor]], tuple[Tensor, ...]]]
        self._getters = [itemgetter(*one) for one in places]
        """For each leaf, the getter of its tensors: parameter, gradient, state."""
        self._bound: _Binding | None = None

    def bind(
        self, tensors: Sequence[Tensor], like: Leaf, totals: Sequence[Tensor], pointers: bytes
    ) -> list[Part] | None:
        """Bind a step, as ``BindParts``; return None if a leaf has no program."""
        if like.param.is_cuda:
            check_not_captured([like.param])
            if any(one % ALIGNMENT for one in memoryview(pointers).cast("q")):
                return None  # a stack is aligned, and torch would sum in another order
        try:
            key, numbers, _ = key_of(self._stages, like)
        except UntraceableError:
            return None
        threads, bound = torch.get_num_threads(), self._bound
        if bound is None or not bound.is_final or key is not bound.key or threads != bound.threads:
            bound = self._find_programs(tensors, like, key)
            if bound is None:
                return None
            self._bound = bound
        return self._calls(bound, tensors, numbers, totals)

    def _find_programs(
        self, tensors: Sequence[Tensor], like: Leaf, key: CacheKey
    ) -> _Binding | None:
        """Divide leaves into stacks, and find all programs; return None if one is missing."""
        one = like._replace(entries=None)
        leaves = [
            with_tensors(one, [each.detach() for each in get(tensors)]) for get in self._getters
        ]
        found = plan_stacks(self._stages, leaves)
        alone: list[tuple[int, LeafProgram]] = []
        for place in found.alone:
            known = program_of(self._stages, leaves[place])
            if isinstance(known, str):
                return None
            alone.append((place, known))
        together: list[tuple[Sequence[int], LeafProgram]] = []
        for places in found.together:
            columns = columns_of([leaves[k] for k in places])
            known = program_of(
                self._stages, with_tensors(leaves[places[0]], stack_columns(columns))
            )
            if isinstance(known, str):
                return None
            together.append((places, known))
        programs = list(dict.fromkeys(known for _, known in [*alone, *together]))
        threads = torch.get_num_threads()
        return _Binding(key, threads, found.is_final, alone, together, programs)

    def _calls(
        self, bound: _Binding, tensors: Sequence[Tensor], numbers: Numbers, totals: Sequence[Tensor]
    ) -> list[Part]:
        prepared = {
            known: (known.step, known.arguments(numbers, totals)) for known in bound.programs
        }
        found: list[Part] = []
        for k, known in bound.alone:
            step, rest = prepared[known]
            found.append(((k,), partial(step, *self._getters[k](tensors), *rest)))
        for places, known in bound.together:
            own = [self._getters[k](tensors) for k in places]
            columns = list(map(list, zip(*own, strict=True)))
            step, rest = prepared[known]
            found.append((places, partial(_step_stack, step, columns, rest)))
        return found


def _step_stack(
    step: Callable[..., object], columns: Sequence[list[Tensor]], rest: Sequence[Any]
) -> None:
    step_columns(columns, lambda whole: step(*whole, *rest))
