"""Interfaces of executors, and of their parts that step many leaves in one call."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from functional_optim.core.leaf import Leaf, Scalars, Stepped
from functional_optim.core.stage import Stage
from functional_optim.kernels.kernel import BindParts, BindScalars, Call


class Chunks(Protocol):
    """Interface for stepping chunks, tables of chunks, and whole leaves, in place.

    A chunk is a :class:`~functional_optim.core.leaf.Leaf` whose tensors are 1-D and contiguous.
    """

    exact: bool
    """True if steps on the CPU equal the reference bit for bit."""
    joins: bool
    """True if one call may step many leaves by their addresses."""

    def require_kernels(self, stages: Sequence[Stage], leaves: Sequence[Leaf]) -> None:
        """Check that kernels can step leaves; raise KernelError, with nothing changed, if not.

        A pointwise chain that is stepped by the reference is checked where it is bound.
        """

    def bind_table(self, stages: Sequence[Stage], like: Leaf, elements: int) -> BindScalars | None:
        """Bind steps of a table of chunks, one call for each step; None if no kernel can."""

    def may_list(self, stages: Sequence[Stage], tensors: Sequence[Tensor]) -> bool:
        """Return True if a leaf with these tensors, parameter first, is stepped in a list."""

    def bind_lists(
        self,
        stages: Sequence[Stage],
        like: Leaf,
        columns: Sequence[list[Tensor]],
        totals: Sequence[Tensor],
    ) -> Call:
        """Bind a step of leaves given as lists of tensors, in as few calls as possible.

        Args:
            like: a leaf with the coefficients and dtypes of all leaves.
            columns: a list of all parameters, one of all gradients, and one for each tensor of the
                state. The tensors of a leaf have one shape and layout.
            totals: the total of each measured stage.
        """

    def bind_chunk(self, stages: Sequence[Stage], chunk: Leaf, totals: Sequence[Tensor]) -> Call:
        """Bind a step of one chunk; ``totals`` holds the total of each measured stage.

        All errors are raised here, before anything is written.
        """

    def totals(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the totals of all measured stages: the known totals, then the computed ones."""

    def validate(self, stages: Sequence[Stage], chunk: Leaf, totals: Sequence[Tensor]) -> None:
        """Check once that chunks may be joined and cut; raise NotPointwiseError if not."""

    def explain(self, stages: Sequence[Stage], chunk: Leaf, *, listed: bool = False) -> str:
        """Return the name of the kernel that steps a chunk, and the reason.

        Args:
            listed: True if the chunk represents several leaves that may be stepped in a list.
        """

    def compile(self, stages: Sequence[Stage], chunk: Leaf) -> None:
        """Compile the kernel of a chunk, if it is not compiled yet."""

    def bind_leaves(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], places: Sequence[Sequence[int]]
    ) -> BindParts:
        """Bind steps of contiguous leaves on the CPU or on CUDA, which share no memory.

        Args:
            leaves: with the same coefficients and dtypes. Their tensors are not kept.
            places: for each leaf, the positions of its tensors in the list of a step.
        """


class Executor(ABC):
    """Base class of executors, which run the stages of a chain over leaves.

    Your own executor derives from this class, implements the four abstract functions, and gets a
    name by :func:`~functional_optim.kernels.register_executor`. The defaults are those of an
    executor that steps leaves one by one, with Python numbers as coefficients.

    ``measured`` holds the totals of the first measured stages, in order, if the caller knows them
    (from other shards or ranks). All other totals are summed over the given leaves.
    """

    exact: bool = False
    """True if steps on the CPU equal the reference bit for bit."""
    takes_dtensors: bool = False
    """True if the executor takes DTensors, for chains that need whole tensors. For all other
    chains, every executor gets the shards of this rank."""
    devices: frozenset[str] = frozenset()
    """Types of devices whose tensors the executor steps. The reference steps all other tensors, and
    DTensors of chains that need whole tensors. If this is empty, the executor steps all tensors."""

    @abstractmethod
    def update(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> list[Stepped]:
        """Return the results of a step as new tensors; the leaves do not change."""

    @abstractmethod
    def update_(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> None:
        """Make a step in place: write to the parameters and states of the leaves."""

    @abstractmethod
    def measure(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> Tensor:
        """Return the total over the leaves for the first measured stage not in ``measured``."""

    @abstractmethod
    def require(self, stages: Sequence[Stage], leaves: Sequence[Leaf]) -> None:
        """Check that every leaf can be stepped; raise KernelError, with nothing changed, if not."""

    def in_chunks(self, stages: Sequence[Stage]) -> Chunks | None:
        """Return the object that steps chunks; None if leaves are stepped one by one."""
        return None

    def in_whole_leaves(self, stages: Sequence[Stage]) -> Chunks | None:
        """Return the object that binds whole leaves; None if leaves are not bound."""
        return None

    def taking(self, scalars: Scalars) -> "Executor | None":
        """Return the executor for coefficients on the host or on the device; None if there is none.

        CUDA graphs may capture its steps if the coefficients are on the device.
        """
        return self if scalars is Scalars.HOST else None

    def explain_leaves(
        self,
        stages: Sequence[Stage],
        name: str,
        like: Callable[[], Leaf] | None = None,
        elements: int = 0,
    ) -> str:
        """Return how the executor steps leaves that are not chunks.

        Args:
            name: of the executor.
            like: returns a leaf of one element, with the dtypes and coefficients of all leaves;
                None if they are stepped without a plan.
            elements: total number of elements of the leaves.
        """
        return f"{name}, leaf by leaf"
