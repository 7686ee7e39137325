"""Interfaces of kernels, which step the leaves of a chain in place."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from functional_optim.core.leaf import Leaf
from functional_optim.core.stage import Stage
from functional_optim.kernels.chunks import Table

KernelStep = Callable[[Sequence[Tensor]], object]
"""``run(totals)`` makes one step of the bound chunk, and writes to its tensors.

``totals`` holds the total of each measured stage. All checks were made when the chunk was bound.
"""


def no_op(totals: Sequence[Tensor]) -> None:
    """Make the step of a chunk without elements."""


Call = Callable[[], object]
"""Makes a bound step."""

BindScalars = Callable[[tuple[Any, ...], Table, Sequence[Tensor]], Call | None]
"""``bind_scalars(coefficients, table, totals)`` returns the step of the leaves in a table.

The result is None if a static coefficient, such as a flag, has another value than when the table
was bound.
"""


Part = tuple[Sequence[int], Call]
"""The positions of leaves that one call steps, and the call."""

BindParts = Callable[[Sequence[Tensor], Leaf, Sequence[Tensor], bytes], list[Part] | None]
"""``bind_parts(tensors, like, totals, pointers)`` returns the calls of a step of whole leaves.

``like`` is one of the leaves, with the coefficients of the step and its own ``entries``.
``pointers`` are the addresses of all tensors, leaf by leaf, as bytes. The tensors have the same
layouts in each step, and are not kept. The result is None if a leaf has no program.
"""


class KernelError(ValueError):
    """The requested executor cannot run a chain; the text says why, and which executor can."""


class Kernel(Protocol):
    """Interface for stepping one chunk in place, in one or a few passes over memory.

    A chunk is a :class:`~functional_optim.core.leaf.Leaf` whose parameter, gradient and state
    tensors are 1-D, contiguous and of one length. Bound steps run under ``torch.no_grad()``.
    """

    exact: bool
    """True if steps on the CPU, if there are any, equal the reference bit for bit."""

    def is_for(self, chunk: Leaf) -> bool:
        """Return True if the kernel is for the device of a chunk, and of its coefficients."""

    def supports(self, stages: Sequence[Stage], chunk: Leaf) -> str | None:
        """Return the reason why this kernel cannot step a chunk; None if it can."""

    def bind(self, stages: Sequence[Stage], chunk: Leaf) -> KernelStep | str:
        """Bind the next step of a chunk to its coefficients; return the reason if it cannot.

        Nothing is written before the step runs. Results of checks are cached in ``chunk.entries``.
        """

    def explain(self, stages: Sequence[Stage], chunk: Leaf) -> str:
        """Return the name of the kernel, and why it steps this chunk, which it supports."""


class ListKernel(Protocol):
    """Interface for stepping many leaves in one call, given as lists of tensors."""

    name: str
    """The name of the kernel in explanations."""

    def is_for(self, like: Leaf) -> bool:
        """Return True if the kernel is for the device of a leaf, and of its coefficients."""

    def bind_lists(
        self, stages: Sequence[Stage], like: Leaf, columns: Sequence[list[Tensor]]
    ) -> KernelStep | str:
        """Bind the next step of leaves to coefficients; return the reason if it cannot.

        Args:
            like: a leaf with the coefficients and dtypes of all leaves, and its own ``entries``.
            columns: a list of all parameters, one of all gradients, and one for each tensor of the
                state.
        """


class TableKernel(Kernel, Protocol):
    """Interface of a kernel that also steps many leaves in one call, by their addresses."""

    def bind_table(self, stages: Sequence[Stage], like: Leaf, elements: int) -> BindScalars | None:
        """Bind steps of leaves with the same coefficients and dtypes, one call for each step.

        Args:
            like: has their coefficients and dtypes, and as many elements as the largest leaf.
            elements: total number of elements of the leaves.

        Returns:
            None if this kernel cannot step the leaves.
        """
