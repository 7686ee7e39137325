"""Errors of workers, all of them, each with its worker's name."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from functional_optim.remote.staleness import StaleError


class WorkerError(RuntimeError):
    """Failure of one or several workers.

    Where all of them raised a ValueError, all a TypeError, or all a StaleError, it is one too.

    Attributes:
        errors: what each of them raised, by worker.

    Example::

        >>> raise failed("step", {"ps1": ValueError("lr is NaN")}, 3)
        Traceback (most recent call last):
            ...
        functional_optim.remote.errors.WorkerValueError: step failed on 1 of 3 workers:
          ps1: ValueError: lr is NaN
    """

    def __init__(self, text: str, errors: Mapping[str, BaseException]) -> None:
        super().__init__(text)
        self.errors = dict(errors)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.errors)


class WorkerValueError(WorkerError, ValueError):
    """All of them raised a ValueError."""


class WorkerTypeError(WorkerError, TypeError):
    """All of them raised a TypeError."""


class WorkerStaleError(WorkerError, StaleError):
    """All of them were given gradients that are too old."""


def failed(what: str, errors: Mapping[str, BaseException], workers: int) -> WorkerError:
    """The error for what workers raised.

    Args:
        what: was being done.
        errors: by worker.
        workers: how many there are.
    """
    lines = [f"{what} failed on {len(errors)} of {workers} workers:"]
    lines += [f"  {name}: {type(one).__name__}: {one}" for name, one in errors.items()]
    found = list(errors.values())
    kind = WorkerError
    if all(isinstance(one, ValueError) for one in found):
        kind = WorkerValueError
    elif all(isinstance(one, TypeError) for one in found):
        kind = WorkerTypeError
    elif all(isinstance(one, StaleError) for one in found):
        kind = WorkerStaleError
    made = kind("\n".join(lines), errors)
    made.__cause__ = found[0]
    return made


def all_of(what: str, futures: Mapping[str, "Future[Any]"]) -> dict[str, Any]:
    """Return the results of all workers, once all have answered.

    Args:
        what: they were asked to do, for errors.
        futures: by worker.

    Raises:
        WorkerError: some failed; it holds the errors of all of them.
    """
    results, errors = settled(futures)
    if errors:
        raise failed(what, errors, len(futures))
    return results


def settled(
    futures: Mapping[str, "Future[Any]"],
) -> tuple[dict[str, Any], dict[str, BaseException]]:
    """Return the results and the errors of workers, once all have answered."""
    results: dict[str, Any] = {}
    errors: dict[str, BaseException] = {}
    for worker, future in futures.items():
        error = future.exception()
        if error is None:
            results[worker] = future.result()
        else:
            errors[worker] = error
    return results, errors
