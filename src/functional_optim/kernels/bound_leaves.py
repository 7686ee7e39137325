"""Leaves that need their whole tensors, bound to what steps them: stacks and programs.

What was found out once stays: which leaves are stepped together, and by which program. A step then
computes the scalars of each program once, and calls it for each stack and each leaf alone.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.core.leaf import Leaf
from functional_optim.core.stage import Stage
from functional_optim.kernels.cache_key import CacheKey, key_of
from functional_optim.kernels.chunks import tensors_of, with_tensors
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


class _Alone(NamedTuple):
    """A leaf that is stepped by itself."""

    place: int
    known: Known
    param: Tensor
    states: list[Tensor]


class _Together(NamedTuple):
    """Leaves that are stepped as one larger tensor each."""

    places: Sequence[int]
    known: Known
    params: list[Tensor]
    states: list[list[Tensor]]
    """All of each tensor of the state."""

    def step(self, gradients: list[Tensor], rest: Sequence[Tensor]) -> None:
        """Step them by these gradients and the further arguments of the program."""

        def step(whole: list[Tensor]) -> None:
            self.known.program.step(*whole, *rest)

        step_columns([self.params, gradients, *self.states], step)


class BoundLeaves:
    """Leaves with coefficients in common, each a plain contiguous tensor of the CPU.

    Args:
        executor: knows which leaves may be stepped together.
        stages: of the chain.
        leaves: that share no memory. Their gradients are not kept.
    """

    def __init__(
        self, executor: StackedExecutor, stages: Sequence[Stage], leaves: Sequence[Leaf]
    ) -> None:
        self._executor, self._stages = executor, stages
        params = [one.param.detach() for one in leaves]
        # In the gradient's place stands what is there anyway.
        self._leaves = [
            one._replace(param=param, grad=param, entries=None)
            for one, param in zip(leaves, params, strict=True)
        ]
        self._key: CacheKey | None = None
        self._threads = 0
        self._settled = False
        self._alone: list[_Alone] = []
        self._together: list[_Together] = []

    def parts(
        self, like: Leaf, gradients: Sequence[Tensor], totals: Sequence[Tensor]
    ) -> list[Part] | None:
        """Bind a step: a call for each part; None where a leaf has no program.

        Args:
            like: one of the leaves, with entries of its own and the numbers of this step.
            gradients: of all leaves, laid out as these.
            totals: the sum of each measured stage.
        """
        try:
            key, numbers, _ = key_of(self._stages, like)
        except UntraceableError:
            return None
        threads = torch.get_num_threads()
        if not self._settled or key is not self._key or threads != self._threads:
            if not self._bind(like, gradients):
                return None
            self._key, self._threads = key, threads
        return self._parts(gradients, numbers, totals)

    def _bind(self, like: Leaf, gradients: Sequence[Tensor]) -> bool:
        """Find stacks and programs for the choices of now; False if a leaf has no program."""
        made = like.coefficients, like.hypers, like.step
        leaves = [
            one._replace(grad=grad, coefficients=made[0], hypers=made[1], step=made[2])
            for one, grad in zip(self._leaves, gradients, strict=True)
        ]
        found = self._executor.stacks_of(self._stages, leaves)
        alone: list[_Alone] = []
        for place in found.alone:
            known = program_of(self._stages, leaves[place])
            if isinstance(known, str):
                return False
            param, _, *states = tensors_of(leaves[place])
            alone.append(_Alone(place, known, param, states))
        together: list[_Together] = []
        for places in found.together:
            columns = columns_of([leaves[k] for k in places])
            known = program_of(self._stages, with_tensors(leaves[places[0]], stacks_of(columns)))
            if isinstance(known, str):
                return False
            together.append(_Together(places, known, columns[0], columns[2:]))
        self._alone, self._together, self._settled = alone, together, found.settled
        return True

    def _parts(
        self, gradients: Sequence[Tensor], numbers: Numbers, totals: Sequence[Tensor]
    ) -> list[Part]:
        every = [one.known for one in self._alone] + [one.known for one in self._together]
        rest = {known: known.arguments(numbers, totals) for known in dict.fromkeys(every)}
        found: list[Part] = [
            ((k,), partial(known.program.step, param, gradients[k], *states, *rest[known]))
            for k, known, param, states in self._alone
        ]
        for one in self._together:
            own = [gradients[k] for k in one.places]
            found.append((one.places, partial(one.step, own, rest[one.known])))
        return found
