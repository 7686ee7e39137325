"""Rows of the table: one algorithm, one other implementation, and options that match."""

from dataclasses import dataclass, field, replace
from typing import Any

Options = dict[str, Any]


@dataclass(frozen=True)
class Cause:
    """Reason why two implementations differ, and the experiment that shows it.

    The experiment is the same comparison with the options below changed. The table shows both
    differences. A cause is confirmed if the experiment differs only by rounding.

    Args:
        text: one sentence.
        ours: our options that the experiment changes.
        theirs: options of the other implementation that the experiment changes.
        algorithm: another algorithm of ours, which then has only the options above.
        variant: a function of a module ``variants_FAMILY`` in place of the other implementation.
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
    """Comparison of one algorithm with one other implementation.

    Args:
        algorithm: the name in ``functional_optim``.
        package: the module of the other implementation.
        name: its class or function, with dots for a module inside the package.
        ours: our options.
        theirs: options of the other implementation. Options under ``"group"`` go to its
            parameter group.
        cause: the reason for a difference that is larger than rounding.
        shapes: shapes of the parameters: a key of ``SHAPES``.
        inputs: True if both take an estimate of the Hessian's diagonal.
        coarsest: the coarsest dtype in which either side computes, for any dtype of parameters.
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
        """Return the full name of the other implementation."""
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


def alike(
    algorithm: str, package: str, name: str, ours: Options, more: Options | None = None, **rest: Any
) -> Row:
    """Return a row in which the other implementation has our options, and more."""
    return Row(algorithm, package, name, ours, {**ours, **(more or {})}, **rest)


def in_optax(
    algorithm: str, name: str, ours: Options, more: Options | None = None, **rest: Any
) -> Row:
    """Return a row in which optax has our options by its names, and more."""
    theirs = {"learning_rate" if key == "lr" else key: value for key, value in ours.items()}
    betas = enumerate(theirs.pop("betas", ()), start=1)
    theirs |= {f"b{number}": beta for number, beta in betas}
    return Row(algorithm, "optax", name, ours, {**theirs, **(more or {})}, **rest)
