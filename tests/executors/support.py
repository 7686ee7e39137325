"""Support for the tests of executors: values, steps, comparisons, threads, and processes."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from functional_optim import Optimizer
from functional_optim.core.leaf import Leaf
from functional_optim.core.state_init import init_leaf
from functional_optim.kernels import EXECUTORS, Chunks, KernelExecutor, ReferenceExecutor
from functional_optim.kernels.chunks import Table
from functional_optim.kernels.exact.program import LoopProgram
from functional_optim.plan.item import coefficients_at

from ..tensors import bits, noise, same_bits  # noqa: F401  for the tests

SHAPES: dict[str, tuple[int, ...]] = {"w": (3, 4), "b": (7,), "s": (), "e": (0, 2)}
LARGE = 1_301
"""Number of elements of a leaf that is its own chunk of several blocks with ``near_borders``."""

Tree = dict[str, Tensor]


def tensors(*trees: Any) -> list[Tensor]:
    """Return every tensor in some trees."""
    return [leaf for leaf in optree.tree_leaves(trees) if isinstance(leaf, Tensor)]


def assert_same(got: Any, want: Any) -> None:
    """Require that two trees have the same structure and the same bits."""
    paths, left, spec = optree.tree_flatten_with_path(got, none_is_leaf=True)
    right, other = optree.tree_flatten(want, none_is_leaf=True)
    assert spec == other
    for path, a, b in zip(paths, left, right, strict=True):
        if a is not b and not same_bits(a, b):
            shown = [one.reshape(-1)[:4].tolist() for one in (a, b)]
            raise AssertionError(f"{path} differs, of {a.shape}: {shown[0]}... is not {shown[1]}")


def differ(a: Any, b: Any) -> bool:
    """Return True if two trees differ anywhere, to show that a comparison can fail."""
    return not all(map(same_bits, tensors(a), tensors(b)))


def tree(seed: int, dtype: torch.dtype = torch.float32, *, large: bool = True) -> Tree:
    """Return small leaves and, if asked for, one large leaf that is stepped alone."""
    made = {
        key: noise(seed + 7 * k, *shape, dtype=dtype)
        for k, (key, shape) in enumerate(SHAPES.items())
    }
    return {**made, "z": noise(seed + 5, LARGE, dtype=dtype)} if large else made


def gradients(
    step: int, dtype: torch.dtype = torch.float32, *, large: bool = True
) -> dict[str, Any]:
    """Return the gradients of a step; one is missing in the second step."""
    grads: dict[str, Any] = tree(100 * (step + 1), dtype, large=large)
    if step == 1:
        grads["b"] = None
    return grads


def pure_steps(
    optimizer: Optimizer, params: Any, grads: Callable[[int], Any], count: int = 3
) -> Any:
    """Return parameters and state after some pure steps."""
    state = optimizer.init(params)
    for step in range(count):
        params, state = optimizer.update(params, grads(step), state)
    return params, state


def steps_in_place(
    optimizer: Optimizer, params: Any, grads: Callable[[int], Any], count: int = 3
) -> Any:
    """Return parameters and state after some steps in place."""
    state = optimizer.init(params)
    for step in range(count):
        optimizer.update_(params, grads(step), state)
    return params, state


def bound_steps(
    optimizer: Optimizer, params: Any, grads: Callable[[int], Any], count: int = 3
) -> Any:
    """Return parameters and state after some steps of a bound optimizer."""
    bound = optimizer.bind(params)
    for step in range(count):
        bound.step(grads(step))
    return bound.params, bound.state


def copied(trees: Any) -> Any:
    """Return the same trees with copies of their tensors."""
    return optree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, trees)


class _Calls(TorchDispatchMode):
    """Recorder of operations whose result is in new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tensors(args, kwargs or {})}
        made = function(*args, **(kwargs or {}))
        for tensor in tensors(made):
            if tensor.numel() > 1 and tensor.untyped_storage().data_ptr() not in given:
                self.new.append(str(function))
        return made


@contextmanager
def new_tensors() -> Iterator[list[str]]:
    """Record the operations that allocate a result of more than one element."""
    calls = _Calls()
    with calls:
        yield calls.new


def _preceded(begin: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    def both(*given: Any) -> Any:
        begin()
        return call(*given)

    return both


def broken_off(
    patch: pytest.MonkeyPatch, at: int, error: type[BaseException] = MemoryError
) -> None:
    """Make call number ``at`` raise, counted from 1, among calls that step a chunk or a table.

    Loops in C++ step tables, and the reference steps leaves without a kernel.
    """
    begun: list[None] = []

    def begin() -> None:
        begun.append(None)
        if len(begun) == at:
            raise error("broken off")

    patch.setattr(ReferenceExecutor, "update_", _preceded(begin, ReferenceExecutor.update_))
    bind_chunk, bound = KernelExecutor.bind_chunk, LoopProgram.bound

    def counted_chunk(*given: Any) -> Callable[[], object]:
        return _preceded(begin, bind_chunk(*given))

    patch.setattr(KernelExecutor, "bind_chunk", counted_chunk)

    def counted_table(self: LoopProgram, table: Table, scalar_args: Any) -> Callable[[], object]:
        call = bound(self, table, scalar_args)

        def run() -> object:
            begin()
            return call()

        return run

    patch.setattr(LoopProgram, "bound", counted_table)


def chunk_executor(name: str) -> Chunks:
    """Return an executor that runs kernels over chunks."""
    found = EXECUTORS[name].in_chunks(())
    assert found is not None
    return found


def chunk_of(
    optimizer: Optimizer, param: Tensor, grad: Tensor | None = None, step: float = 1.0
) -> Leaf:
    """Return a leaf as an executor gets it, with its initial state and any step number."""
    hypers = tuple(link.hyper for link in optimizer.links)
    states = init_leaf(optimizer.stages, hypers, param).stages
    resolved, coefficients = coefficients_at(optimizer.stages, hypers, step)
    grad = torch.ones_like(param) if grad is None else grad
    return Leaf(param, grad, states, coefficients, "w", resolved, step, {})


def why_not(name: str, optimizer: Optimizer, param: Tensor) -> str:
    """Return an executor's explanation of how a leaf is stepped."""
    return chunk_executor(name).explain(optimizer.stages, chunk_of(optimizer, param))


class Twins:
    """Bound optimizer, and the reference's ``update_`` over an equal tree, with equal bits."""

    def __init__(
        self,
        optimizer: Optimizer,
        make: Callable[[], Any],
        executor: Any = None,
        *,
        bind: Any = None,
    ) -> None:
        chosen = optimizer if executor is None else optimizer.using(executor=executor)
        self.optimizer = optimizer.using(executor="reference")
        self.bound: Any = chosen.bind(make()) if bind is None else bind(chosen, make())
        self.plain = make()
        self.state = optimizer.init(self.plain)

    def step(self, grads: Any, plain: Any = None, **options: Any) -> None:
        """Step both; ``plain`` holds the same gradients for the reference, if given."""
        self.bound.step(grads, **options)
        self.optimizer.update_(self.plain, grads if plain is None else plain, self.state, **options)
        self.require_same()

    def require_same(self) -> None:
        assert_same((self.bound.params, self.bound.state), (self.plain, self.state))


def together(*works: Callable[[], Any]) -> list[Any]:
    """Run all works at once in threads; return their results, or raise the first error."""
    barrier, results = threading.Barrier(len(works)), [None] * len(works)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            barrier.wait()
            results[index] = works[index]()
        except BaseException as error:  # noqa: BLE001  raised in the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of threads that compute an operation of torch, or a step."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_a_child(work: Callable[[], Any], seconds: int = 240) -> int:
    """Run ``work`` in a forked child; return its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a handler in Python would not run
            signal.alarm(seconds)  # ends a child that hangs
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
