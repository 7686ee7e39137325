"""A kernel: a chain over one chunk, in place."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from functional_optim.core.leaf import Leaf
from functional_optim.core.stage import Stage
from functional_optim.kernels.chunks import Table

KernelStep = Callable[[Sequence[Tensor]], object]
"""``run(totals)`` makes the step of the chunk that was bound, with the sum of each measured stage.

Whatever can be refused was refused at binding.
"""


def nothing(totals: Sequence[Tensor]) -> None:
    """The step of a chunk without elements."""


Call = Callable[[], object]
"""Makes a step."""

BindChunk = Callable[[Sequence[Stage], Leaf, Sequence[Tensor]], Call]
"""``bind_chunk(stages, chunk, totals)`` gives the step of a chunk."""

BindScalars = Callable[[tuple[Any, ...], Table, Sequence[Tensor]], Call | None]
"""``bind_scalars(coefficients, table, totals)`` gives the step of the leaves in a table.

None where other choices stand among the coefficients than those that were bound.
"""


Part = tuple[Sequence[int], Call]
"""The positions of leaves that are stepped by one call, and the call."""

BindParts = Callable[[Sequence[Tensor], Leaf, Sequence[Tensor], bytes], list[Part] | None]
"""``bind_parts(tensors, like, totals, pointers)`` gives the calls of a step of whole leaves.

``like`` is one of the leaves, with entries of its own and the numbers of the step; ``pointers`` are
the bytes of the pointers to all tensors of the leaves, leaf by leaf. Leaves have the same layouts
at each step, and no tensor is kept. None where a leaf has to be stepped another way.
"""


class KernelError(ValueError):
    """A chain that the executor asked for cannot run; the text says why, and what can."""


class Kernel(Protocol):
    """A way of stepping one chunk in place, in one pass over memory or in few.

    A chunk is a :class:`~functional_optim.core.leaf.Leaf` whose parameter, gradient and state
    tensors are 1-D, contiguous and of one length. What was bound runs under ``torch.no_grad()``.
    """

    exact: bool
    """Whether its steps on the CPU, if it makes any, are bit for bit the reference's."""

    def is_for(self, chunk: Leaf) -> bool:
        """Return True if it steps what lies there, by numbers from there; else it is not asked."""
        ...

    def supports(self, stages: Sequence[Stage], chunk: Leaf) -> str | None:
        """Return why this chunk cannot be stepped by this kernel; None if it can."""
        ...

    def bind(self, stages: Sequence[Stage], chunk: Leaf) -> KernelStep | str:
        """Bind the next step of a chunk, by its coefficients; else return why not.

        Nothing is written before it runs. What is found out is kept in the chunk's entries.
        """
        ...

    def explain(self, stages: Sequence[Stage], chunk: Leaf) -> str:
        """Its name, and why it is used for this chunk, which it supports."""
        ...


class ListingKernel(Protocol):
    """A way of stepping many leaves in one call, given as lists of tensors."""

    called: str
    """What it is called where it is said what steps leaves."""

    def is_for(self, like: Leaf) -> bool:
        """Return True if it steps what lies there, by numbers from there; else it is not asked."""
        ...

    def bind_lists(
        self, stages: Sequence[Stage], like: Leaf, columns: Sequence[list[Tensor]]
    ) -> KernelStep | str:
        """Bind the next step of leaves, by the numbers of ``like``; else return why not.

        Args:
            stages: of the chain.
            like: has what all leaves have in common, and entries of its own.
            columns: all parameters, all gradients, and all of each tensor of the state.
        """
        ...


class JoiningKernel(Kernel, Protocol):
    """A kernel that also steps many leaves in one call, each where it lies."""

    def bind_table(self, stages: Sequence[Stage], like: Leaf, elements: int) -> BindScalars | None:
        """Bind the steps of leaves that share coefficients and dtypes, in one call each.

        Args:
            stages: of the chain.
            like: has their coefficients and dtypes, and as many elements as the longest.
            elements: of all leaves.

        Returns:
            None where this kernel refuses them.
        """
        ...
