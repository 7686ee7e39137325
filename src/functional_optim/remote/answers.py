"""Answers from another process: a result, an error, or nothing in time."""

import pickle
import time
import traceback
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any, NamedTuple


class Failure(NamedTuple):
    """Error of a call on a worker."""

    error: BaseException


def sendable(error: BaseException, worker: str) -> Failure:
    """An error that can be sent, with the traceback that it had here in its notes.

    Args:
        error: that was raised.
        worker: the name of this one.
    """
    where = "".join(traceback.format_exception(error))
    made = error.with_traceback(None)
    made.__cause__ = made.__context__ = None
    try:
        pickle.loads(pickle.dumps(made))  # noqa: S301  what was just written
    except Exception:  # noqa: BLE001  of a class that pickle cannot make anew
        made = RuntimeError(f"{type(error).__name__}: {error}")
    made.add_note(f"on the worker {worker}:\n{where}")
    return Failure(made)


def no_answer(worker: str, why: str, error: BaseException | None = None) -> ConnectionError:
    """Return the error for a worker that did not answer.

    Args:
        worker: its name.
        why: in a line.
        error: of who told it.
    """
    made = ConnectionError(f"no answer from {worker!r}, which may be gone: {why}")
    made.__cause__ = error
    return made


class Answer(Future[Any]):
    """A Future that fails where its worker gives no answer in time.

    Who waits without a time-out waits until then; the worker may still make the call afterwards.

    Args:
        worker: its name.
        seconds: from now on.
        late: what it is told who waits in vain.

    Example::

        >>> Answer("ps0", 0.0, "nothing came within 0 s").exception()
        ConnectionError("no answer from 'ps0', which may be gone: nothing came within 0 s")
    """

    def __init__(self, worker: str, seconds: float, late: str) -> None:
        super().__init__()
        self._worker, self._late = worker, late
        self._came = False
        self._until = time.monotonic() + seconds

    def give(self, value: Any) -> None:
        """The worker has answered; too late, if who waited has given up."""
        self._came = True
        with suppress(InvalidStateError):
            self.set_result(value)

    def fail(self, error: BaseException) -> None:
        """It has failed, or cannot be reached."""
        self._came = True
        with suppress(InvalidStateError):
            self.set_exception(error)

    @property
    def is_late(self) -> bool:
        """Return True if who waited has given up, and nothing has come since."""
        return self.done() and not self._came

    def result(self, timeout: float | None = None) -> Any:
        """Return the worker's result.

        Raises:
            ConnectionError: it gave no answer in time.
        """
        self._wait(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the worker's error; a ConnectionError if it gave no answer in time."""
        self._wait(timeout)
        return super().exception(timeout)

    def _wait(self, timeout: float | None) -> None:
        if timeout is None and not self.done():
            wait([self], max(0.0, self._until - time.monotonic()))
            with suppress(InvalidStateError):  # where it has come in the meantime
                self.set_exception(no_answer(self._worker, self._late))
