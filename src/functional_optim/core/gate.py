"""Gate: the declaration of a stage that decides if the stages behind it run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Gate:
    """Declaration of a stage that decides if the stages behind it run, and count the step.

    Args:
        opens: ``opens(shared)`` tells whether they do, from the stage's shared numbers of this
            step. The stage itself, and those before it, run in any case.
        holds: what a leaf keeps in the stage's state while the gate is closed. A leaf that has no
            gradient when the gate opens, but had one since it opened last, is not forgotten: with
            "gradient" it goes on behind the gate with what it keeps; with "parameter" the gate's
            stage alone runs, to put the parameter back.

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
