"""Search for the smallest example that breaks a law."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, Self, TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st


class Example(Protocol):
    """Example for which a law is checked."""

    def smaller(self) -> Iterator[Self]:
        """Return simpler examples. Repeated calls must end."""
        ...


E = TypeVar("E", bound=Example)
L = TypeVar("L")


class LawBroken(AssertionError):  # noqa: N818  the name of the outcome
    """Error for a broken law.

    ``law`` is the name of the law, and ``example`` the smallest example found that breaks it. For
    an optimizer it is a run: replay it with ``example.replay(optimizer)``.

    Example::

        >>> import torch
        >>> from functional_optim import sgd
        >>> from functional_optim.testing import check_optimizer
        >>> def twice_as_fast(params):
        ...     return torch.optim.SGD(params, lr=2e-3, foreach=False)
        >>> try:
        ...     check_optimizer(sgd, twice_as_fast, laws=["same as the oracle"])
        ... except LawBroken as error:
        ...     print(error.law)
        same as the oracle
    """

    def __init__(
        self, law: str, example: Any, reason: BaseException, says: str | None, hint: str = ""
    ) -> None:
        self.law = law
        self.example = example
        super().__init__(
            f"the law {law!r} is broken: {reason}\n{(says or '').strip()}\n"
            f"{f'{hint}{chr(10)}' if hint else ''}smallest example:\n{example}"
        )


def law_named(name: str, laws: Mapping[str, L]) -> L:
    """Return the law of a name."""
    if name not in laws:
        raise ValueError(f"there is no law {name!r}; use one of {', '.join(map(repr, laws))}")
    return laws[name]


def smallest_that_fails(
    examples: st.SearchStrategy[E],
    check: Callable[[E], object],
    *,
    max_examples: int,
    derandomize: bool,
) -> tuple[E, Exception] | None:
    """Search for an example for which a check raises, and make it smaller.

    Return the example and its exception; None if no example fails.
    """
    failed: list[tuple[E, Exception]] = []

    @settings(
        max_examples=max_examples,
        derandomize=derandomize,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
    )
    @given(examples)
    def property_(example: E) -> None:
        try:
            check(example)
        except Exception as error:
            failed.append((example, error))
            raise

    try:
        property_()
    except Exception:
        if not failed:
            raise
        # Hypothesis runs the smallest failing example last.
        return _reduce(check, *failed[-1])
    return None


def _reduce(check: Callable[[E], object], example: E, reason: Exception) -> tuple[E, Exception]:
    """Return a simpler example that fails in the same way.

    Hypothesis changes one choice at a time, so it stops if two choices must change together. For
    example, one step has gradients of all leaves.
    """
    found: tuple[E, Exception] | None = example, reason
    while found is not None:
        example, reason = found
        found = _find_simpler(check, example, type(reason))
    return example, reason


def _find_simpler(
    check: Callable[[E], object], example: E, kind: type[Exception]
) -> tuple[E, Exception] | None:
    """Return the first simpler example that raises an exception of this class, or None."""
    for candidate in example.smaller():
        try:
            check(candidate)
        except kind as error:
            return candidate, error
        except Exception:  # noqa: BLE001, S112  another fault, which would hide this one
            continue
    return None
