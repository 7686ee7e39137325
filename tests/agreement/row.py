"""Rows of the table: one algorithm, one other implementation, and options that match."""

from dataclasses import dataclass, field, replace
from typing import Any

Options = dict[str, Any]


@dataclass(frozen=True)
class Cause:
    """The reason why two implementations differ, and the experiment that shows it.

    The experiment is the same comparison with the options below changed. The table has its result
    beside the difference: a cause counts as found if the rest is rounding.

    Args:
        text: one sentence.
        ours: options of ours that the experiment changes.
        theirs: options of the other implementation that the experiment changes.
    """

    text: str
    ours: Options = field(default_factory=dict)
    theirs: Options = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A comparison of one algorithm with one other implementation.

    Args:
        algorithm: the name in ``functional_optim``.
        package: the module of the other implementation.
        name: its class or function, with dots for a module inside the package.
        ours: options of ours.
        theirs: options of the other implementation.
        cause: the reason of a difference that is larger than rounding.
        matrices: whether the parameters are matrices only.
        inputs: whether both take an estimate of the Hessian's diagonal.
        coarsest: the coarsest dtype that either side computes in, whatever the parameters have.
    """

    algorithm: str
    package: str
    name: str
    ours: Options = field(default_factory=dict)
    theirs: Options = field(default_factory=dict)
    cause: Cause | None = None
    matrices: bool = False
    inputs: bool = False
    coarsest: str | None = None

    @property
    def other(self) -> str:
        """The full name of the other implementation."""
        return f"{self.package}.{self.name}"

    def experiment(self) -> "Row":
        """Return the comparison without the cause.

        Raises:
            ValueError: the row has no cause.
        """
        if self.cause is None:
            raise ValueError(f"{self.algorithm} and {self.other}: there is no cause to remove")
        ours, theirs = {**self.ours, **self.cause.ours}, {**self.theirs, **self.cause.theirs}
        return replace(self, ours=ours, theirs=theirs, cause=None)
