"""Workers that are processes of torch.distributed.rpc. Imported only if such workers are used."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed import rpc

from functional_optim.engine.recipes import OpaqueRecipe, Recipe
from functional_optim.remote import contexts
from functional_optim.remote.errors import gather_results
from functional_optim.remote.futures import Failure, encode_error, no_answer_error
from functional_optim.remote.message import Message, decode, encode
from functional_optim.remote.transport import START_SECONDS, check_seconds
from functional_optim.remote.worker import WorkerGroup, WorkerOptimizer


class _Address(NamedTuple):
    """Address of a placed object."""

    worker: str
    key: int | None
    """Key of the object in its process; None if Python cannot refer to it weakly.

    Calls send the key and not the RRef: an RRef that is sent to its owner causes a second message.
    """


_PLACED: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Objects placed in this process, by key, as long as an RRef refers to them."""


class RpcTransport:
    """Transport to processes that have called ``init_rpc``, which are workers by their RPC names.

    A worker that gives no answer within the time-out of ``init_rpc`` (``rpc_timeout`` of its
    options) is an error that names the worker. The gradients or the state dict of a call are one
    flat buffer.

    Args:
        start_timeout: seconds for a worker to import modules and to build the object placed on it;
            above 0, ten minutes by default.
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
        self._addresses: WeakKeyDictionary[Any, _Address] = WeakKeyDictionary()

    def place(self, worker: str, make: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Call ``make(*args)`` in a worker's process. Return a Future of an RRef to the result."""

        def register(found: tuple[Any, int | None]) -> Any:
            handle, key = found
            self._addresses[handle] = _Address(worker, key)
            return handle

        limit = self._start_timeout
        late = (
            f"within {limit:g} s it has not made what is placed on it; if the machine is busy, "
            f"give a start_timeout above {limit:g}"
        )
        return _send(worker, _place_here, (make, args), register, limit, late)

    def call(self, handle: Any, method: str, *args: Any) -> "Future[Any]":
        """Call a method of the value of an RRef, in the process that owns it."""
        worker, key = self._addresses[handle]
        target = handle if key is None else key

        def convert(found: Any, _: Any = handle) -> Any:  # keeps the RRef until the answer
            return found

        try:
            arguments = (target, method, tuple(map(_encode_container, args)))
        except Exception as error:  # noqa: BLE001  arguments that cannot be sent
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed
        return _send(worker, _call_here, arguments, convert, None)

    def close(self) -> None:
        """Do nothing: an object is deleted with the last RRef to it."""


def _send(
    worker: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    convert: Callable[[Any], Any],
    limit: float | None,
    late: str = "",
) -> "Future[Any]":
    """Call a function in a worker's process. Return a Future of the converted result.

    ``limit`` is None for the time-out of ``init_rpc``. ``late`` explains a time-out.
    """
    future: Future[Any] = Future()
    try:
        seconds = rpc.get_rpc_timeout() if limit is None else limit
        answer = rpc.rpc_async(worker, _run_here, args=(function, args), timeout=seconds)
    except Exception as error:  # noqa: BLE001  no such worker, or arguments that cannot be sent
        future.set_exception(error)
        return future

    def on_answer(found: Any) -> None:
        try:
            value = found.value()
        except Exception as error:  # noqa: BLE001  the future raises it
            # A traceback follows the first line of torch's error.
            line = next(iter(str(error).strip().splitlines()), type(error).__name__)
            why = f"{late} ({line})" if late and _TIMEOUT_TEXT in line else line
            future.set_exception(no_answer_error(worker, why, error))
            return
        if isinstance(value, Failure):
            future.set_exception(value.error)
        else:
            future.set_result(convert(_decode_message(value)))

    answer.add_done_callback(on_answer)
    return future


def _encode_container(value: Any) -> Any:
    """Encode gradients or a state dict as one message: RPC would send each tensor separately."""
    return encode(value) if isinstance(value, (list, dict)) else value


def _decode_message(value: Any) -> Any:
    return decode(value) if isinstance(value, Message) else value


_TIMEOUT_TEXT = "RPC ran for more than set timeout"
"""Text of torch's error for a call that timed out."""


def _run_here(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call a function in this process, and return its result or a Failure."""
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001  the caller raises it
        return encode_error(error, rpc.get_worker_info().name)


def _place_here(make: Callable[..., Any], args: Sequence[Any]) -> Any:
    placed, key = make(*args), secrets.randbits(62)
    try:
        _PLACED[key] = placed
    except TypeError:
        return rpc.RRef(placed), None
    return rpc.RRef(placed), key


def _call_here(target: Any, method: str, args: Sequence[Any]) -> Any:
    placed = _PLACED[target] if isinstance(target, int) else target.local_value()
    return _encode_container(getattr(placed, method)(*map(_decode_message, args)))


def make_worker(recipe: Recipe | OpaqueRecipe, groups: Sequence[WorkerGroup]) -> WorkerOptimizer:
    """Return the optimizer over the parameters of RRefs, on the worker that owns them."""
    groups = [one._replace(params=[_local_param(*pair) for pair in one.params]) for one in groups]
    return WorkerOptimizer(recipe, groups, contexts.LOCK, contexts.ContextExchange())


def fetch_meta_tensors(pairs: Mapping[str, Sequence[tuple[str, Any]]]) -> dict[str, Tensor]:
    """Return meta tensors of the shapes and dtypes of each worker's RRefs, by name."""

    def to_meta(specs: Sequence[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in specs]

    futures = {
        worker: _send(worker, _param_specs_here, (list(own),), to_meta, START_SECONDS)
        for worker, own in pairs.items()
    }
    found = gather_results("the constructor", futures)
    return {
        name: like
        for worker, own in pairs.items()
        for (name, _), like in zip(own, found[worker], strict=True)
    }


def _param_specs_here(pairs: Sequence[tuple[str, Any]]) -> Any:
    params = [_local_param(*pair) for pair in pairs]
    return [(param.shape, param.dtype) for _, param in params]


def _local_param(name: str, rref: Any) -> tuple[str, Tensor]:
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name!r} must be an RRef to a parameter, got one to a {type(value).__name__}"
        )
    return name, value


def is_rref(value: Any) -> bool:
    return isinstance(value, rpc.PyRRef)
