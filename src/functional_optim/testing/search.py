"""Looking for the smallest example that breaks a law."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, Self, TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st


class Example(Protocol):
    """Example that a law is tried with."""

    def smaller(self) -> Iterator[Self]:
        """Return simpler examples, in every way that leads to no cycle."""
        ...


E = TypeVar("E", bound=Example)
L = TypeVar("L")


class LawBroken(AssertionError):  # noqa: N818  it says what happened
    """A law is broken.

    ``law`` is the law's name, ``example`` the smallest found that breaks it: of an optimizer, a run
    to look at with ``example.replay(optimizer)``.
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
    """A law of a table.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in laws:
        raise ValueError(f"there is no law {name!r}; there are {', '.join(map(repr, laws))}")
    return laws[name]


def smallest_that_fails(
    examples: st.SearchStrategy[E],
    check: Callable[[E], object],
    *,
    max_examples: int,
    derandomize: bool,
) -> tuple[E, Exception] | None:
    """Look for an example for which a check raises, and make it smaller.

    Args:
        examples: where to look.
        check: raises an Exception where the example fails.
        max_examples: how many are drawn.
        derandomize: draw the same each time.

    Returns:
        It, with what was raised; None where none fails.
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
        return _reduced(check, *failed[-1])
    return None


def _reduced(check: Callable[[E], object], example: E, reason: Exception) -> tuple[E, Exception]:
    """Leave out parts, and make others simpler, while it fails in the same way.

    Hypothesis changes one choice at a time, and so stops where two must change together: a step
    goes through all leaves, and a number that was picked from a list is not one that was drawn.
    """
    found: tuple[E, Exception] | None = example, reason
    while found is not None:
        example, reason = found
        found = _simpler(check, example, type(reason))
    return example, reason


def _simpler(
    check: Callable[[E], object], example: E, kind: type[Exception]
) -> tuple[E, Exception] | None:
    """The first simpler example that fails in this way; None where none does."""
    for candidate in example.smaller():
        try:
            check(candidate)
        except kind as error:
            return candidate, error
        except Exception:  # noqa: BLE001, S112  another fault, which would hide this one
            continue
    return None
