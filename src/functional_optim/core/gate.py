"""Gate: the declaration of a stage that decides if the stages after it run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Gate:
    """Declaration of a stage that decides if the stages after it run, and count the step.

    Args:
        opens: ``opens(shared)`` returns True if they run, from the stage's shared scalars of this
            step. The gate's stage, and the stages before it, always run.
        holds: what the stage's state keeps for a leaf while the gate is closed. It matters for a
            leaf that has no gradient when the gate opens, but had one since the last opening. With
            "gradient", the stages after the gate step this leaf with the gradient in the state.
            With "parameter", the gate's stage runs, to restore the parameter, and later gates treat
            the gradient as missing.

    Example::

        >>> from typing import NamedTuple
        >>> class Count(NamedTuple):
        ...     calls: float
        >>> every_third = Gate(lambda shared: shared.calls % 3 == 0)
        >>> [every_third.opens(Count(float(k))) for k in range(1, 7)]
        [False, False, True, False, False, True]
    """

    opens: Callable[[Any], bool]
    holds: Literal["nothing", "gradient", "parameter"] = "nothing"
