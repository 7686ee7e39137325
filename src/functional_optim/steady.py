"""Coefficients for a step, computed anew only where they depend on its number.

Of a few small parameters, a step takes as long as the Python around it; some stages only hand their
hyper-parameters on. That a function takes no notice of the step is seen in its code: it never loads
that argument. (Its results cannot tell: a schedule may be constant for a while.)
"""

import dis
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any

from functional_optim.stage import Stage

_SEES_ALL = frozenset(["locals", "vars", "eval", "exec", "_getframe", "currentframe"])
"""Names by which a function gets at arguments that it does not load."""


@lru_cache(maxsize=None)
def takes_notice(function: Any) -> bool:
    """Whether a function may look at its first argument; True where that cannot be seen.

    Example::

        >>> takes_notice(lambda step, hyper: hyper)
        False
        >>> takes_notice(lambda step, hyper: 0.9**step)
        True
    """
    if not isinstance(function, FunctionType):
        return True
    code = function.__code__
    if code.co_argcount == 0 or code.co_varnames[0] in code.co_cellvars:
        return True
    if _SEES_ALL.intersection(code.co_names):
        return True
    name = code.co_varnames[0]
    for one in dis.get_instructions(code):
        loaded = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        if "FAST" in one.opname and name in loaded:
            return True
    return False


def coefficients_of(
    stages: Sequence[Stage], hypers: Sequence[Any]
) -> Callable[[float], tuple[Any, ...]]:
    """``found(step)`` gives the coefficients of every stage, for plain hyper-parameters.

    Args:
        stages: of the chain.
        hypers: one Hyper per stage, of plain numbers.
    """
    once: list[Any] = []
    anew = []
    for place, (stage, own) in enumerate(zip(stages, hypers, strict=True)):
        if takes_notice(stage.coefficients):
            anew.append((place, stage.coefficients, own))
            once.append(None)
        else:
            once.append(stage.coefficients(1.0, own))
    if not anew:
        same = tuple(once)
        return lambda step: same

    def found(step: float) -> tuple[Any, ...]:
        made = once.copy()
        for place, function, own in anew:
            made[place] = function(step, own)
        return tuple(made)

    return found
