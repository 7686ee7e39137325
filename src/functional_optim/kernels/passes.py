"""Passes: a chain that is cut at transforms of lists of whole leaves, and its compiled loops.

A chain such as LAMB's has one stage that needs whole tensors; its other stages are pointwise. Such
a chain is cut at the stages with a ``transform_each_``. Compiled loops run the stages between.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.hyper import is_plain
from functional_optim.core.leaf import Leaf, is_measured
from functional_optim.core.stage import Stage, Transform
from functional_optim.kernels.chunks import why_not_flat
from functional_optim.kernels.errors import NotPointwiseError
from functional_optim.kernels.kernel import BindScalars
from functional_optim.kernels.reference import ReferenceExecutor


class HandOnHyper(NamedTuple):
    pass


class HandOnState(NamedTuple):
    grad: Tensor


def hand_on_transform(
    grad: Tensor, param: Tensor, state: HandOnState, c: HandOnHyper
) -> tuple[Tensor, HandOnState]:
    return grad, HandOnState(grad)


HAND_ON = Transform(
    name="hand_on", hyper=HandOnHyper, state=HandOnState, transform=hand_on_transform
)
"""Last stage of a loop, which stores the gradients as its state for the next pass."""


class Pass(NamedTuple):
    """Pointwise stages ``[start, stop)`` of a chain, and the whole-leaf stage after them."""

    start: int
    stop: int
    whole: Transform | None
    """The stage at ``stop``; None in the last pass."""
    reads: int
    """The index of the scratch with the input gradients; -1 for the gradients of the step."""
    writes: int
    """The index of the scratch with the output gradients; ``reads`` if there is no loop."""

    @property
    def has_loop(self) -> bool:
        """True if there are pointwise stages, or gradients of the step must be copied."""
        return self.start < self.stop or (self.whole is not None and self.reads < 0)


def passes_of(stages: Sequence[Stage]) -> list[Pass] | None:
    """Return the passes of a chain; None if it cannot be cut into passes."""
    places = [k for k, stage in enumerate(stages) if stage.kind != "pointwise"]
    if not places or any(stage.granularity > 1 for stage in stages):
        return None
    if any(isinstance(one, Transform) and one.raw for one in stages[places[0] :]):
        return None  # later passes do not have the raw gradient
    found: list[Pass] = []
    start, reads = 0, -1
    for place in places:
        whole = stages[place]
        if not isinstance(whole, Transform) or whole.transform_each_ is None:
            return None
        # A loop must not write to the scratch that it reads.
        writes = reads if start == place and reads >= 0 else int(reads == 0)
        found.append(Pass(start, place, whole, reads, writes))
        start, reads = place + 1, writes
    if start < len(stages):
        found.append(Pass(start, len(stages), None, reads, reads))
    return found


def can_pass(stages: Sequence[Stage], passes: Sequence[Pass], leaves: Sequence[Leaf]) -> bool:
    """Return True if the pointwise stages have states of each parameter's size."""
    if len({_form_of(leaf) for leaf in leaves}) > 1:
        return False
    for one in passes:
        own = stages[one.start : one.stop]
        for leaf in leaves:
            part = leaf._replace(states=leaf.states[one.start : one.stop])
            if why_not_flat(own, part) is not None:
                return False
    return True


def _form_of(leaf: Leaf) -> tuple[tuple[int, ...], ...]:
    """Return the number of tensors in each field of each state; -1 if a field is not a list."""
    return tuple(
        tuple(len(one) if isinstance(one, list) else -1 for one in state) for state in leaf.states
    )


BindTable = Callable[[Sequence[Stage], Leaf, int], BindScalars | None]
"""``bind_table`` of a kernel that steps many leaves in one call."""


class BoundLoops:
    """Loops of all passes for certain static coefficients. They hold no tensor."""

    def __init__(self, bound: list[BindScalars | None], dtypes: list[torch.dtype]) -> None:
        self.bound = bound
        """For each pass, its loop; None if the pass has none."""
        self.dtypes = dtypes
        """The dtype of each scratch."""


class PassLoops:
    """Compiled loops of the passes of a chain."""

    def __init__(
        self, bind_table: BindTable, stages: Sequence[Stage], passes: Sequence[Pass]
    ) -> None:
        self._bind_table, self._stages, self._passes = bind_table, tuple(stages), passes
        self._reference = ReferenceExecutor()
        self._entries: list[dict[Any, Any]] = [{} for _ in passes]
        self._wholes = [one.stop for one in passes if one.whole is not None]

    def can_bind(self, coefficients: Sequence[Any]) -> bool:
        """Return True if no whole-leaf stage has a coefficient that is a tensor.

        A derivative with respect to such a tensor may be needed.
        """
        return is_plain([coefficients[k] for k in self._wholes])

    def _leaf(self, number: int, like: Leaf, dtypes: Sequence[torch.dtype]) -> Leaf:
        """Return a leaf of one element for the loop of a pass; ``dtypes`` are those of scratch."""
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
        """Bind loops for the static coefficients of a step; return None if a pass has no loop."""
        if not self.can_bind(like.coefficients):
            return None
        bound: list[BindScalars | None] = []
        dtypes = [like.grad.dtype] * (1 + max(one.writes for one in self._passes))
        for number, one in enumerate(self._passes):
            if not one.has_loop:
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
                return None  # whole leaves can be stepped in another way
            if loop is None:
                return None
            bound.append(loop)
        return BoundLoops(bound, dtypes)


def explain_passes(
    bind_table: BindTable, stages: Sequence[Stage], like: Callable[[], Leaf], elements: int
) -> str | None:
    """Return how passes step leaves; None if they cannot."""
    passes = passes_of(stages)
    if passes is None or PassLoops(bind_table, stages, passes).bind(like(), elements) is None:
        return None
    whole = " and ".join(one.whole.name for one in passes if one.whole is not None)
    return f"exact; compiled, in {len(passes)} passes, around {whole} on lists of leaves"
