"""Chunk: leaves that are stepped together, and the numbers of their next step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from functional_optim.core.hyper import is_plain
from functional_optim.core.stage import Stage
from functional_optim.kernels import Chunks, Leaf
from functional_optim.kernels.kernel import Call
from functional_optim.plan.counts import Counts
from functional_optim.plan.gradients import GradientAddresses
from functional_optim.plan.item import Made, coefficients_at

Numbers = Sequence[Made]
"""What the leaves of each group are stepped by, where their step count does not decide it."""


class Way(Protocol):
    """Way of stepping the leaves of a chunk."""

    def call(
        self, chunk: "Chunk", gradients: list[Tensor], totals: Sequence[Tensor]
    ) -> Call | None:
        """Bind a step, after which nothing is refused; None if this way does not apply.

        Args:
            chunk: that was told of the numbers of the step.
            gradients: of all leaves of the plan.
            totals: the sum of each measured stage.

        Raises:
            KernelError, NotPointwiseError: the executor asked for does not step them.
        """
        ...


@dataclass
class Chunk:
    """Leaves that have hyper-parameters, step count, dtypes and device in common."""

    stages: Sequence[Stage]
    executor: Chunks
    """That binds kernels to them."""
    members: Sequence[int]
    """Their places among the leaves of the plan."""
    is_all: bool
    """Whether these are all leaves of the plan, in their order."""
    group: int
    """Whose hyper-parameters they have."""
    counts: Counts
    like: Leaf
    """The longest of them; it stands for all that they have in common."""
    gradients: GradientAddresses | None
    """Where their gradients lie this time; None where these stay where they are."""
    ways: tuple[Way, ...]
    """In which they are stepped where they lie: the first that takes them makes the step."""
    otherwise: tuple[Way, ...] = ()
    """In which they are stepped else, unless they may be brought together by other means."""
    addresses: Sequence[int] | bytes | None = None
    """Where the gradients of this step begin."""
    made: int = 0
    """How many steps its leaves had made when they were looked at last."""
    hypers: tuple[Any, ...] = ()
    """Those of the last step."""
    plain: bool = True
    """Whether these are numbers that stay the same from step to step."""
    required: tuple[Any, ...] | None = None
    """Those for which the executor was last seen to take the leaves."""
    resolved: tuple[Any, ...] = ()
    """The same, with the numbers that schedules give for this step."""
    coefficients: tuple[Any, ...] = ()
    """Those of this step."""

    def take(
        self, gradients: list[Tensor], hypers: Sequence[tuple[Any, ...]], numbers: Numbers | None
    ) -> bool:
        """Take what is new at a step; whether its gradients are such as kernels take.

        Args:
            gradients: of all leaves of the plan.
            hypers: of each group, checked.
            numbers: what the leaves of each group are stepped by, in the place of ``hypers`` and of
                their step counts.
        """
        if numbers is None:
            now = hypers[self.group]
            if now is not self.hypers:
                self._use(now)
            made = coefficients_at(self.stages, now, self.made + 1.0, plain=self.plain)
            self.resolved, self.coefficients = made
        else:
            self.resolved, self.coefficients, step, _ = numbers[self.group]
            assert not isinstance(step, Tensor), "it was read from a tensor with memory"
            self.made, self.required = int(step) - 1, None  # choices may be others at each step
        if self.gradients is None:
            return True
        own = gradients if self.is_all else self.own(gradients)
        self.addresses = self.gradients.of(own)
        return self.addresses is not None

    def _use(self, hypers: tuple[Any, ...]) -> None:
        """Hyper-parameters of this step, where they are others than before."""
        known = set(map(id, self.hypers)) if self.plain else ()
        new = [one for one in hypers if id(one) not in known]
        self.hypers, self.plain = hypers, all(map(is_plain, new))

    def own(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return the gradients of the chunk's leaves."""
        return gradients if self.is_all else [gradients[place] for place in self.members]

    def numbered(self, leaf: Leaf) -> Leaf:
        """A leaf with the numbers of this step."""
        return leaf._replace(
            hypers=self.resolved, coefficients=self.coefficients, step=self.made + 1.0
        )

    def require(self, leaves: Sequence[Leaf]) -> None:
        """Make sure that the executor takes its leaves: once for the same numbers.

        Raises:
            KernelError: it does not.
        """
        if self.plain and self.required is self.hypers:
            return
        self.executor.require(self.stages, leaves)
        self.required = self.hypers
