"""Compiled loops for the passes of a chain."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from functional_optim.core.hyper import is_plain
from functional_optim.core.leaf import Leaf, is_measured
from functional_optim.core.stage import Stage
from functional_optim.kernels.errors import NotPointwiseError
from functional_optim.kernels.kernel import BindScalars
from functional_optim.kernels.passes import HAND_ON, HandOnHyper, HandOnState, Pass, passes_of
from functional_optim.kernels.reference import ReferenceExecutor

BindTable = Callable[[Sequence[Stage], Leaf, int], BindScalars | None]
"""``bind_table`` of a kernel that steps many leaves in one call."""


class BoundLoops:
    """Loops of all passes for some choices among the coefficients. They hold no tensor."""

    def __init__(self, bound: list[BindScalars | None], dtypes: list[torch.dtype]) -> None:
        self.bound = bound
        """For each pass, its loop; None if the pass has none."""
        self.dtypes = dtypes
        """For each scratch, its dtype."""


class PassLoops:
    """Compiled loops of the passes of a chain.

    Args:
        bind_table: of the kernel that makes the loops.
        stages: of the chain.
        passes: of :func:`~functional_optim.kernels.passes.passes_of`.
    """

    def __init__(
        self, bind_table: BindTable, stages: Sequence[Stage], passes: Sequence[Pass]
    ) -> None:
        self._bind_table, self._stages, self._passes = bind_table, tuple(stages), passes
        self._reference = ReferenceExecutor(tries_pointwise=False)
        self._entries: list[dict[Any, Any]] = [{} for _ in passes]
        self._wholes = [one.stop for one in passes if one.whole is not None]

    def takes(self, coefficients: Sequence[Any]) -> bool:
        """Return True if no stage that takes whole leaves has a tensor among its coefficients.

        A derivative with respect to such a tensor may be needed.
        """
        return is_plain([coefficients[k] for k in self._wholes])

    def _leaf(self, number: int, like: Leaf, dtypes: Sequence[torch.dtype]) -> Leaf:
        """Return a leaf of one element, as the loop of a pass sees it.

        Args:
            number: of the pass.
            like: a leaf of one element.
            dtypes: of each scratch so far.
        """
        one = self._passes[number]
        grad, states = like.grad, like.states[one.start : one.stop]
        if one.reads >= 0:
            grad = torch.zeros(1, dtype=dtypes[one.reads], device="cpu")
        coefficients = like.coefficients[one.start : one.stop]
        hypers = like.hypers[one.start : one.stop]
        if one.whole is not None:
            states = (*states, HandOnState(grad))
            coefficients, hypers = (*coefficients, HandOnHyper()), (*hypers, HandOnHyper())
        return like._replace(
            grad=grad,
            states=states,
            coefficients=coefficients,
            hypers=hypers,
            entries=self._entries[number],
        )

    def _stages_of(self, one: Pass) -> tuple[Stage, ...]:
        own = self._stages[one.start : one.stop]
        return own if one.whole is None else (*own, HAND_ON)

    def bind(self, like: Leaf, elements: int) -> BoundLoops | None:
        """Bind loops for the choices of now; None if a pass has none.

        Args:
            like: a leaf of one element, with the numbers of a step.
            elements: of all leaves.
        """
        if not self.takes(like.coefficients):
            return None
        bound: list[BindScalars | None] = []
        dtypes = [like.grad.dtype] * (1 + max(one.writes for one in self._passes))
        for number, one in enumerate(self._passes):
            if not one.loops:
                bound.append(None)
                continue
            stages, leaf = self._stages_of(one), self._leaf(number, like, dtypes)
            if one.whole is not None:
                totals = [torch.ones((), dtype=torch.float64, device="cpu")] * sum(
                    map(is_measured, stages)
                )
                (made,) = self._reference.update(stages, [leaf], totals)
                grad = made.states[-1].grad
                dtypes[one.writes] = grad.dtype
                leaf = leaf._replace(states=(*leaf.states[:-1], HandOnState(grad)))
            try:
                loop = self._bind_table(stages, leaf, elements)
            except NotPointwiseError:
                return None  # which shows only in parts of a leaf: these are whole
            if loop is None:
                return None
            bound.append(loop)
        return BoundLoops(bound, dtypes)


def explain_passes(
    bind_table: BindTable, stages: Sequence[Stage], like: Callable[[], Leaf], elements: int
) -> str | None:
    """Return how passes step leaves; None if they do not.

    Args:
        bind_table: of the kernel that makes the loops.
        stages: of the chain.
        like: gives a leaf of one element, with the numbers of a step.
        elements: of all leaves.
    """
    passes = passes_of(stages)
    if passes is None or PassLoops(bind_table, stages, passes).bind(like(), elements) is None:
        return None
    whole = " and ".join(one.whole.name for one in passes if one.whole is not None)
    return f"exact; compiled, in {len(passes)} passes, around {whole} on lists of leaves"
