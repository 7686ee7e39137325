"""Interface of an executor."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from functional_optim.core.leaf import Leaf, Scalars, Stepped
from functional_optim.core.stage import Stage
from functional_optim.kernels.kernel import BindParts, BindScalars, Call


class Chunks(Protocol):
    """Interface for stepping chunks, and tables of chunks, in place.

    A chunk is a :class:`~functional_optim.core.leaf.Leaf` whose tensors are 1-D and contiguous.
    """

    exact: bool
    """Whether its steps on the CPU are bit for bit the reference's."""
    joins: bool
    """Whether it may step leaves together, where they lie."""

    def require(self, stages: Sequence[Stage], leaves: Sequence[Leaf]) -> None:
        """Make sure that every chunk can be stepped; KernelError, with nothing changed, if not."""
        ...

    def bind_table(self, stages: Sequence[Stage], like: Leaf, elements: int) -> BindScalars | None:
        """Bind the steps of a table of chunks, one call each; None if no kernel makes them."""
        ...

    def may_list(self, stages: Sequence[Stage], tensors: Sequence[Tensor]) -> bool:
        """Return True if a leaf with these tensors, parameter first, is stepped in a list."""
        ...

    def bind_lists(
        self,
        stages: Sequence[Stage],
        like: Leaf,
        columns: Sequence[list[Tensor]],
        totals: Sequence[Tensor],
    ) -> Call:
        """Bind a step of leaves given as lists of tensors, in as few calls as can be.

        Args:
            stages: of the chain.
            like: has what all leaves have in common, and the numbers of the step.
            columns: all parameters, all gradients, and all of each tensor of the state; those of a
                leaf have one shape and layout.
            totals: the sum of each measured stage.
        """
        ...

    def bind_chunk(self, stages: Sequence[Stage], chunk: Leaf, totals: Sequence[Tensor]) -> Call:
        """Bind a step of one chunk; ``totals`` holds the sum of each measured stage.

        Whatever can be refused is refused here, where nothing is written.
        """
        ...

    def totals(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> list[Tensor]:
        """The sums of all measured stages, those that are given and those to be taken here."""
        ...

    def validate(self, stages: Sequence[Stage], chunk: Leaf, totals: Sequence[Tensor]) -> None:
        """Make sure, once, that chunks may be joined and cut; NotPointwiseError if not."""
        ...

    def explain(self, stages: Sequence[Stage], chunk: Leaf, *, listed: bool = False) -> str:
        """Return the kernel of a chunk, and why.

        Args:
            stages: of the chain.
            chunk: memory that is stepped.
            listed: whether it stands for several leaves, each of which may be stepped in a list.
        """
        ...

    def compile(self, stages: Sequence[Stage], chunk: Leaf) -> None:
        """Compile what steps a chunk, if it is not compiled yet."""
        ...


class Wholes(Chunks, Protocol):
    """Interface for stepping leaves of chains that need their whole tensors, in place."""

    def bind_leaves(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], places: Sequence[Sequence[int]]
    ) -> BindParts:
        """Bind the steps of plain contiguous leaves of the CPU, which share no memory.

        Args:
            stages: of the chain.
            leaves: with coefficients and dtypes in common. Their tensors are not kept.
            places: for each leaf, the positions of its tensors in the list of a step.
        """
        ...


class Executor(ABC):
    """A way of mapping the stages of a chain over leaves.

    One of your own derives from it, has the four functions, and gets a name by
    :func:`~functional_optim.kernels.register_executor`. What it does not say of itself is said
    here as of one that steps whole leaves, one by one, with Python's numbers.

    ``measured`` holds the totals of the first measured stages, in order, where the caller knows
    them (from other shards or ranks); the rest is summed over the leaves at hand.
    """

    exact: bool = False
    """Whether its steps on the CPU are bit for bit the reference's."""
    takes_dtensors: bool = False
    """True if it computes with DTensors as they are, for chains that need whole tensors. Of any
    other chain, every executor is given the shards of this rank."""
    stand_ins: Mapping[str, str] = MappingProxyType({})
    """By type of device, the name of the executor that is taken in its place there. On devices that
    are not named, and for DTensors, it is the reference; the executor itself if this is empty."""

    @abstractmethod
    def update(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> list[Stepped]:
        """New tensors; the leaves stay as they are."""

    @abstractmethod
    def update_(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> None:
        """Step in place: write into the params and states of the leaves."""

    @abstractmethod
    def measure(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> Tensor:
        """The sum over the leaves that the first stage not in ``measured`` needs."""

    @abstractmethod
    def require(self, stages: Sequence[Stage], leaves: Sequence[Leaf]) -> None:
        """Make sure that every leaf can be stepped; KernelError, with nothing changed, if not."""

    def in_chunks(self, stages: Sequence[Stage]) -> Chunks | None:
        """Return the stepper of chunks of a chain; None if leaves are stepped one by one."""
        return None

    def in_wholes(self, stages: Sequence[Stage]) -> Wholes | None:
        """Return the stepper of whole leaves of a chain; None if each step looks at them anew."""
        return None

    def taking(self, scalars: Scalars) -> "Executor | None":
        """Return the executor for numbers from there; None if there is none.

        CUDA graphs may capture its steps where that is the device.
        """
        return self if scalars is Scalars.HOST else None

    def explain_leaves(
        self,
        stages: Sequence[Stage],
        name: str,
        like: Callable[[], Leaf] | None = None,
        elements: int = 0,
    ) -> str:
        """Return how it steps leaves that are no chunks.

        Args:
            stages: of the chain.
            name: that the executor has.
            like: gives a leaf of one element, with the dtypes and numbers of all; None if they are
                stepped without a plan.
            elements: of all leaves.
        """
        return f"{name}, leaf by leaf"
