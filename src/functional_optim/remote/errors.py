"""Errors of workers: all of them in one error, with the names of the workers."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from functional_optim.remote.staleness import StaleError


class WorkerError(RuntimeError):
    """Failure of one or several workers.

    It is also a ValueError, a TypeError or a StaleError if all errors of the workers are.

    Attributes:
        errors: the error of each worker, by name.

    Example::

        >>> raise worker_error("step", {"ps1": ValueError("lr is NaN")}, 3)
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
    """WorkerError if all workers raised a ValueError."""


class WorkerTypeError(WorkerError, TypeError):
    """WorkerError if all workers raised a TypeError."""


class WorkerStaleError(WorkerError, StaleError):
    """WorkerError if the gradients of all workers are too old."""


def worker_error(what: str, errors: Mapping[str, BaseException], workers: int) -> WorkerError:
    """Return the error for an operation that raised ``errors`` on some of several workers."""
    lines = [f"{what} failed on {len(errors)} of {workers} workers:"]
    lines += [f"  {name}: {type(one).__name__}: {one}" for name, one in errors.items()]
    found, kind = list(errors.values()), WorkerError
    for special in (WorkerStaleError, WorkerTypeError, WorkerValueError):
        if all(isinstance(one, special.__bases__[1]) for one in found):
            kind = special
    made = kind("\n".join(lines), errors)
    made.__cause__ = found[0]
    return made


def gather_results(what: str, futures: Mapping[str, "Future[Any]"]) -> dict[str, Any]:
    """Return the results of an operation on all workers, after all workers have answered."""
    results, errors = collect_results(futures)
    if errors:
        raise worker_error(what, errors, len(futures))
    return results


def collect_results(
    futures: Mapping[str, "Future[Any]"],
) -> tuple[dict[str, Any], dict[str, BaseException]]:
    """Return the results and the errors of workers, after all workers have answered."""
    results: dict[str, Any] = {}
    errors: dict[str, BaseException] = {}
    for worker, future in futures.items():
        error = future.exception()
        if error is None:
            results[worker] = future.result()
        else:
            errors[worker] = error
    return results, errors
