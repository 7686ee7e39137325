"""Selection of test cases, by pairs of options or all combinations, and names of failing cases.

`make test` tries enough cases to find a fault in any option: pairs of options, and a few drawn
examples that are equal in every run. `make test-all` tries every combination, and many examples
that differ between runs.
"""

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from allpairspy import AllPairs
from hypothesis import HealthCheck, settings

EVERYTHING = os.environ.get("FUNCTIONAL_OPTIM_TESTS") == "all"
"""True in a run of `make test-all`."""

Item = TypeVar("Item")
MORE = 20
"""Factor by which `make test-all` draws more examples."""


def pairs(**options: Collection[Any]) -> list[dict[str, Any]]:
    """Return combinations of options in which any two values of two options occur together.

    `make test-all` uses all combinations.
    """
    if EVERYTHING or len(options) < 2:
        chosen = itertools.product(*options.values())
    else:
        chosen = AllPairs([list(values) for values in options.values()])
    return [dict(zip(options, values, strict=True)) for values in chosen]


def each(*items: str, **options: Collection[Any]) -> Callable[[Callable[..., None]], Any]:
    """Run a test with pairs of options in one item; a failure names the options.

    Args:
        items: names of options of which every value gets a separate item.
        options: arguments of the test, and their values. Other arguments are fixtures, which
            all cases of an item share.
    """
    return functools.partial(_each, items, options, {})


def each_value(**options: Collection[Any]) -> Callable[[Callable[..., None]], Any]:
    """Run a test like :func:`each`, but pass it the values of mappings that the keys name."""
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


def has_turn(number: int, *places: int) -> bool:
    """Return True for one of ``number`` cases in a row, and for all if everything is tested.

    Args:
        number: cases of which one is tried.
        places: positions of a case's options in their tables. The sum decides, so that each value
            of an option is tried with some value of each other option.
    """
    return EVERYTHING or sum(places) % number == 0


def one_in(number: int, items: Iterable[Item]) -> list[Item]:
    """Return every ``number``-th item, or all items if everything is tested."""
    return list(items)[:: 1 if EVERYTHING else number]


def examples(number: int, **more: Any) -> settings:
    """Return Hypothesis settings for a test that draws this number of examples in `make test`."""
    chosen: dict[str, Any] = {"suppress_health_check": list(HealthCheck), **more}
    return settings(max_examples=number * MORE if EVERYTHING else number, **chosen)


@contextmanager
def case(**named: Any) -> Iterator[None]:
    """Name one of several cases of a test in an error that is raised in the block."""
    try:
        yield
    except BaseException as error:  # some failures of pytest are not Exceptions
        error.add_note("case: " + ", ".join(f"{name}={value!r}" for name, value in named.items()))
        raise
