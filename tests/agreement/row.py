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
        algorithm: another algorithm of ours, which then has no options but those above.
        variant: a function of a module ``variants_FAMILY`` in place of theirs.
        shapes: other shapes of the parameters: a key of ``SHAPES``.
    """

    text: str
    ours: Options = field(default_factory=dict)
    theirs: Options = field(default_factory=dict)
    algorithm: str | None = None
    variant: str | None = None
    shapes: str | None = None


@dataclass(frozen=True)
class Row:
    """A comparison of one algorithm with one other implementation.

    Args:
        algorithm: the name in ``functional_optim``.
        package: the module of the other implementation.
        name: its class or function, with dots for a module inside the package.
        ours: options of ours.
        theirs: options of the other implementation; those under ``"group"`` belong to its group of
            parameters.
        cause: the reason of a difference that is larger than rounding.
        shapes: shapes of the parameters: a key of ``SHAPES``.
        inputs: whether both take an estimate of the Hessian's diagonal.
        coarsest: the coarsest dtype that either side computes in, whatever the parameters have.
    """

    algorithm: str
    package: str
    name: str
    ours: Options = field(default_factory=dict)
    theirs: Options = field(default_factory=dict)
    cause: Cause | None = None
    shapes: str = "all"
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
        cause = self.cause
        changed: Options = {"theirs": {**self.theirs, **cause.theirs}, "cause": None}
        changed["ours"] = {**self.ours, **cause.ours}
        if cause.algorithm is not None:
            changed |= {"algorithm": cause.algorithm, "ours": cause.ours}
        if cause.variant is not None:
            changed |= {"name": f"variants.{cause.variant}"}
        return replace(self, shapes=cause.shapes or self.shapes, **changed)
