"""Workers that are processes of torch.distributed.rpc. Imported when such workers are asked for."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed import rpc

from functional_optim.frontends.local_optimizer import Foreign
from functional_optim.frontends.recipe import Recipe
from functional_optim.remote import contexts
from functional_optim.remote.answers import Failure, no_answer, sendable
from functional_optim.remote.errors import all_of
from functional_optim.remote.message import Message, decoded, encoded
from functional_optim.remote.transport import START_SECONDS, check_seconds
from functional_optim.remote.worker import Share, WorkerOptimizer


class _Address(NamedTuple):
    """Address of a placed object."""

    worker: str
    key: int | None
    """By which that process finds it, in place of the RRef: one that is sent to its owner brings a
    second message back. None for what Python cannot refer to weakly."""


_PLACED: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""What was placed in this process, by its key, as long as an RRef keeps it."""


class RpcTransport:
    """Places objects in processes that have called ``init_rpc``, under the names that they have.

    A worker that gives no answer within the time-out of ``init_rpc`` (``rpc_timeout`` of its
    options) is an error that names it. The gradients or the state dict of a call are one flat
    buffer.

    Args:
        start_timeout: seconds for a worker to make what is placed on it, for which it imports what
            it needs; above 0, ten minutes by default.

    Raises:
        RuntimeError: ``init_rpc`` was not called.
        ValueError: a time-out that is not above 0.
    """

    has_contexts = True
    keeps_order = False

    def __init__(self, *, start_timeout: float = START_SECONDS) -> None:
        self._start_timeout = check_seconds("start_timeout", start_timeout)
        try:
            rpc.get_worker_info()
        except RuntimeError as error:
            raise RuntimeError(
                "parameters on other workers are reached by torch.distributed.rpc, which is not "
                "initialised in this process: call torch.distributed.rpc.init_rpc(name, rank=..., "
                "world_size=...) first, on all workers"
            ) from error
        self._places: WeakKeyDictionary[Any, _Address] = WeakKeyDictionary()

    def place(self, worker: str, make: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Call ``make(*args)`` in a worker's process; a Future of an RRef to what it returns."""

        def placed(found: tuple[Any, int | None]) -> Any:
            handle, key = found
            self._places[handle] = _Address(worker, key)
            return handle

        limit = self._start_timeout
        return _sent(worker, _placed_here, (make, args), placed, limit, _not_started(limit))

    def call(self, handle: Any, method: str, *args: Any) -> "Future[Any]":
        """Call a method of what an RRef refers to, where that is."""
        place = self._places[handle]
        what = handle if place.key is None else place.key

        def answered(found: Any, _: Any = handle) -> Any:  # the RRef is kept until then
            return found

        try:
            given = (what, method, tuple(map(_in_one, args)))
        except Exception as error:  # noqa: BLE001  what is to be sent cannot be
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed
        limit = None  # that of init_rpc
        return _sent(place.worker, _called_here, given, answered, limit)

    def close(self) -> None:
        """Nothing to do: what was placed goes when the last RRef to it does."""


def _sent(
    worker: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    made: Callable[[Any], Any],
    limit: float | None,
    late: str = "",
) -> "Future[Any]":
    """Call a function in a worker's process; a Future of what is made of its answer."""
    future: Future[Any] = Future()
    try:
        seconds = rpc.get_rpc_timeout() if limit is None else limit
        answer = rpc.rpc_async(worker, function, args=args, timeout=seconds)
    except Exception as error:  # noqa: BLE001  the worker is gone, or what is sent cannot be
        future.set_exception(error)
        return future

    def answered(found: Any) -> None:
        try:
            value = found.value()
        except Exception as error:  # noqa: BLE001  handed on to who waits
            told = _first_line(error)
            why = f"{late} ({told})" if late and _LATE in told else told
            future.set_exception(no_answer(worker, why, error))
            return
        if isinstance(value, Failure):
            future.set_exception(value.error)
        else:
            future.set_result(made(_taken_apart(value)))

    answer.add_done_callback(answered)
    return future


def _in_one(value: Any) -> Any:
    """Gradients, or a state dict, as one message: RPC itself sends tensor by tensor."""
    return encoded(value) if isinstance(value, (list, dict)) else value


def _taken_apart(value: Any) -> Any:
    return decoded(value) if isinstance(value, Message) else value


_LATE = "RPC ran for more than set timeout"
"""What torch says of a call that has no answer in time."""


def _not_started(seconds: float) -> str:
    """Return the error for a caller whose placement timed out."""
    return (
        f"within {seconds:g} s it has not made what is placed on it; if the machine is busy, give "
        f"a start_timeout above {seconds:g}"
    )


def _first_line(error: BaseException) -> str:
    """Return the first line of torch's error; a traceback follows it."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _placed_here(make: Callable[..., Any], args: Sequence[Any]) -> Any:
    try:
        thing, key = make(*args), secrets.randbits(62)
        try:
            _PLACED[key] = thing
        except TypeError:
            return rpc.RRef(thing), None
        return rpc.RRef(thing), key
    except Exception as error:  # noqa: BLE001  raised where it was called from
        return sendable(error, rpc.get_worker_info().name)


def _called_here(what: Any, method: str, args: Sequence[Any]) -> Any:
    try:
        thing = _PLACED[what] if isinstance(what, int) else what.local_value()
        return _in_one(getattr(thing, method)(*map(_taken_apart, args)))
    except Exception as error:  # noqa: BLE001  raised where it was called from
        return sendable(error, rpc.get_worker_info().name)


def check_context(context_id: int) -> None:
    """A context that is open here.

    Raises:
        RuntimeError: there is none with this id.
    """
    if not contexts.is_open(context_id):
        raise RuntimeError(
            f"there is no distributed autograd context {context_id} in this process; call step "
            "inside of torch.distributed.autograd.context(), with the id that it gave"
        )


def make_worker(found: Recipe | Foreign, shares: Sequence[Share]) -> WorkerOptimizer:
    """The optimizer over parameters that RRefs refer to, on the worker that owns them.

    Raises:
        TypeError: an RRef to something else than a tensor.
    """
    shares = [share._replace(params=[_local(*pair) for pair in share.params]) for share in shares]
    return WorkerOptimizer(found, shares, contexts.TURN, contexts.InContexts())


def likes_of(asked: Mapping[str, Sequence[tuple[str, Any]]]) -> dict[str, Tensor]:
    """Tensors without memory, of the shapes and dtypes of what RRefs refer to, by name.

    Args:
        asked: for each worker, names and the RRefs to what it owns.

    Raises:
        WorkerError: an RRef to something else than a tensor; a worker that gave no answer.
    """

    def made(kinds: Sequence[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in kinds]

    futures = {
        worker: _sent(worker, _kinds_here, (list(pairs),), made, START_SECONDS)
        for worker, pairs in asked.items()
    }
    found = all_of("the constructor", futures)
    return {
        name: like
        for worker, pairs in asked.items()
        for (name, _), like in zip(pairs, found[worker], strict=True)
    }


def _kinds_here(pairs: Sequence[tuple[str, Any]]) -> Any:
    try:
        params = [_local(*pair) for pair in pairs]
        return [(param.shape, param.dtype) for _, param in params]
    except Exception as error:  # noqa: BLE001  raised where it was called from
        return sendable(error, rpc.get_worker_info().name)


def _local(name: str, rref: Any) -> tuple[str, Tensor]:
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name!r} must be an RRef to a parameter, got one to a {type(value).__name__}"
        )
    return name, value


def is_rref(value: Any) -> bool:
    """Return True if it is a remote reference."""
    return isinstance(value, rpc.PyRRef)


def owner_of(rref: Any) -> str:
    """The name of the worker that an RRef's value lives on."""
    name: str = rref.owner_name()
    return name
