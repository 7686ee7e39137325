"""Leaves that need their whole tensors, bound to what steps them: stacks and programs.

What was found out once stays: which leaves are stepped together, and by which program. A step then
computes the scalars of each program once, and calls it for each stack and each leaf alone.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim._torch import foreach_copy_
from functional_optim.core.leaf import Leaf
from functional_optim.core.stage import Stage
from functional_optim.kernels.cache_key import CacheKey, key_of
from functional_optim.kernels.chunks import tensors_of, with_tensors
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.kernel import Part
from functional_optim.kernels.signature import Numbers
from functional_optim.kernels.stacked import StackedExecutor, stacked
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
    columns: list[list[Tensor]]
    """All parameters, and all of each tensor of the state."""

    def step(self, gradients: list[Tensor], rest: Sequence[Tensor]) -> None:
        """Bring them together, step, and bring the results back."""
        param, *states = self.columns
        written = [stacked(0, param)]
        grad = stacked(1, gradients)
        written += [stacked(place, column) for place, column in enumerate(states, 2)]
        self.known.program.step(written[0], grad, *written[1:], *rest)
        for targets, values in zip(self.columns, written, strict=True):
            foreach_copy_(targets, list(values.unbind(0)))


class BoundLeaves:
    """Leaves with coefficients in common, each a plain contiguous tensor of the CPU.

    Args:
        executor: knows which leaves may be stepped together.
        stages: of the chain.
        leaves: none of which shares memory with another. Their gradients are not kept.
    """

    def __init__(
        self, executor: StackedExecutor, stages: Sequence[Stage], leaves: Sequence[Leaf]
    ) -> None:
        self._executor, self._stages = executor, stages
        self._leaves = [one._replace(param=one.param.detach(), entries=None) for one in leaves]
        self._leaves = [one._replace(grad=one.param) for one in self._leaves]
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
            columns = [list(one) for one in zip(*[tensors_of(leaves[k]) for k in places])]  # noqa: B905  of one kind
            whole = [stacked(place, column) for place, column in enumerate(columns)]
            known = program_of(self._stages, with_tensors(leaves[places[0]], whole))
            if isinstance(known, str):
                return False
            together.append(_Together(places, known, [columns[0], *columns[2:]]))
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
