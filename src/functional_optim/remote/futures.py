"""Futures of calls in another process, and errors that can be sent."""

import pickle
import time
import traceback
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any, NamedTuple


class Failure(NamedTuple):
    """Error of a call on a worker."""

    error: BaseException


def encode_error(error: BaseException, worker: str) -> Failure:
    """Return an error of this worker that can be pickled, with its traceback in its notes."""
    where = "".join(traceback.format_exception(error))
    made = error.with_traceback(None)
    made.__cause__ = made.__context__ = None
    try:
        pickle.loads(pickle.dumps(made))  # noqa: S301  what was just written
    except Exception:  # noqa: BLE001  of a class that cannot be pickled
        made = RuntimeError(f"{type(error).__name__}: {error}")
    made.add_note(f"on the worker {worker}:\n{where}")
    return Failure(made)


def no_answer_error(worker: str, why: str, error: BaseException | None = None) -> ConnectionError:
    """Return the error for a worker that did not answer, with the reason in one line."""
    made = ConnectionError(f"no answer from {worker!r}, which may be gone: {why}")
    made.__cause__ = error
    return made


class WorkerFuture(Future[Any]):
    """Future that fails if its worker gives no answer in time.

    ``result()`` without a time-out waits until the deadline. The worker may still make the call
    later.

    Args:
        worker: its name.
        seconds: from now to the deadline.
        late: the message of the error at the deadline.

    Example::

        >>> WorkerFuture("ps0", 0.0, "nothing came within 0 s").exception()
        ConnectionError("no answer from 'ps0', which may be gone: nothing came within 0 s")
    """

    def __init__(self, worker: str, seconds: float, late: str) -> None:
        super().__init__()
        self._worker, self._late = worker, late
        self._is_complete = False
        self._deadline = time.monotonic() + seconds

    def complete(self, value: Any) -> None:
        """Set the result. After the deadline this has no effect."""
        self._is_complete = True
        with suppress(InvalidStateError):
            self.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Set the error. After the deadline this has no effect."""
        self._is_complete = True
        with suppress(InvalidStateError):
            self.set_exception(error)

    @property
    def has_timed_out(self) -> bool:
        """Return True if the deadline has passed, and the worker has not answered since."""
        return self.done() and not self._is_complete

    def result(self, timeout: float | None = None) -> Any:
        """Return the worker's result."""
        self._wait(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the worker's error; a ConnectionError if it gave no answer in time."""
        self._wait(timeout)
        return super().exception(timeout)

    def _wait(self, timeout: float | None) -> None:
        if timeout is None and not self.done():
            wait([self], max(0.0, self._deadline - time.monotonic()))
            with suppress(InvalidStateError):  # the answer came just now
                self.set_exception(no_answer_error(self._worker, self._late))
