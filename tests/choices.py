"""Selection of test cases, options in pairs or all of them, and the names of failing cases.

`make test` tries enough of them to find a fault in any option: options in pairs, and few drawn
examples, the same in every run. `make test-all` tries every combination, and many examples, others
in each run.
"""

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from allpairspy import AllPairs
from hypothesis import HealthCheck, settings

EVERYTHING = os.environ.get("FUNCTIONAL_OPTIM_TESTS") == "all"
"""Whether this is a run of `make test-all`."""

MORE = 20
"""How many times as many examples are drawn where everything is tried."""


def pairs(**options: Collection[Any]) -> list[dict[str, Any]]:
    """Combinations of options in which each value of each meets each value of every other.

    With everything tried: all combinations.
    """
    if EVERYTHING or len(options) < 2:
        chosen = itertools.product(*options.values())
    else:
        chosen = AllPairs([list(values) for values in options.values()])
    return [dict(zip(options, values, strict=True)) for values in chosen]


def each(*items: str, **options: Collection[Any]) -> Callable[[Callable[..., None]], Any]:
    """Run a test with options in pairs, all in one item; a failure says with which.

    Args:
        items: names of options of which every value is an item of its own.
        options: arguments of the test, and their values. Its other arguments are fixtures, which
            all cases of an item share.
    """
    return functools.partial(_each, items, options, {})


def each_value(**options: Collection[Any]) -> Callable[[Callable[..., None]], Any]:
    """The same, where a test is given the values of a mapping, which its keys name."""
    tables = {name: one for name, one in options.items() if isinstance(one, Mapping)}
    return functools.partial(_each, (), options, tables)


def _each(
    items: Collection[str],
    options: Mapping[str, Collection[Any]],
    tables: Mapping[str, Mapping[Any, Any]],
    test: Callable[..., None],
) -> Any:
    @functools.cache
    def chosen() -> list[dict[str, Any]]:
        return pairs(**options)

    @functools.wraps(test)
    def run(*of: Any, **given: Any) -> None:
        for one in chosen():
            if all(one[name] == given[name] for name in items):
                found = {name: tables[name][key] for name, key in one.items() if name in tables}
                with case(**one):
                    test(*of, **{**given, **one, **found})

    taken = inspect.signature(test)
    left = [p for p in taken.parameters.values() if p.name in items or p.name not in options]
    run.__signature__ = taken.replace(parameters=left)  # type: ignore[attr-defined]
    for name in items:
        run = pytest.mark.parametrize(name, list(options[name]))(run)
    return run


def examples(number: int, **more: Any) -> settings:
    """Settings of Hypothesis for a test that draws so many examples in `make test`."""
    chosen: dict[str, Any] = {"suppress_health_check": list(HealthCheck), **more}
    return settings(max_examples=number * MORE if EVERYTHING else number, **chosen)


@contextmanager
def case(**named: Any) -> Iterator[None]:
    """One of several cases of a test: an error inside says which."""
    try:
        yield
    except BaseException as error:  # of pytest's failures, some are no Exception
        error.add_note("case: " + ", ".join(f"{name}={value!r}" for name, value in named.items()))
        raise
