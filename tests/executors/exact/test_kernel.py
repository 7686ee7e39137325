"""The exact kernel over leaves of every length, layout and dtype, in any number of threads."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from functional_optim import Optimizer, adamw, chain, clip_by_global_norm, lion, qhm, sgd
from functional_optim.executors.exact.program import Program, Table
from functional_optim.testing import CASES, CHAINS
from functional_optim.testing.runs import Run, runs

from ..rules import RULES
from ..support import copied, noise
from .support import assert_equal, assert_steps_are_equal, explained

TABLE = {**CASES, **CHAINS}
EXECUTORS = ["compile", "auto"]
LENGTHS = (1, 2, 31, 127, 128, 129, 1_025, 4_096, 70_001, 1_000_003)


@pytest.fixture(params=[1, 2, 4])
def in_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """So many threads compute a step."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def leaves(lengths: Any, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [noise(seed + k, length, dtype=dtype) for k, length in enumerate(lengths)]


@pytest.mark.parametrize("name", TABLE)
def test_lengths(name: str, in_threads: int) -> None:
    """Each alone, and all of them in one call."""
    optimizer = TABLE[name].factory()
    for lengths in (*((one,) for one in LENGTHS[:-1]), LENGTHS):
        assert_steps_are_equal(
            optimizer,
            leaves(lengths, 1),
            lambda step, lengths=lengths: leaves(lengths, 50 * (step + 1)),
            steps=2,
        )


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_options(name: str, dtype: torch.dtype) -> None:
    """Whatever options a chain has, of leaves that are drawn."""
    case = TABLE[name]

    @settings(
        max_examples=8,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(runs(case.options, (dtype,), max_steps=3, large=False, shapes=((), (0,), (33,), (4, 9))))
    def is_reference(run: Run) -> None:
        optimizer = case.factory(**run.kwargs)
        grads = list(run.grads())
        for executor in EXECUTORS:
            assert_steps_are_equal(
                optimizer, run.params(), grads.__getitem__, executor=executor, steps=len(grads)
            )

    is_reference()


SHORT = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize(
    "optimizer", [RULES["selects"], RULES["swap"], RULES["numbers_on_the_left"]]
)
def test_sixteen_bits(optimizer: Optimizer, dtype: torch.dtype, in_threads: int) -> None:
    """Each operation is rounded, by any number of threads and at the end of any length."""
    if dtype == torch.bfloat16:
        assert explained(optimizer, torch.ones(300, dtype=dtype)).startswith("exact")
    for lengths in ((70_001,), (3, 1_025, 200_003), (1,)):
        assert_steps_are_equal(
            optimizer,
            leaves(lengths, 1, dtype),
            lambda step, lengths=lengths: leaves(lengths, 50 * (step + 1), dtype),
        )


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("name", TABLE)
def test_sixteen_bits_of_every_algorithm(name: str, dtype: torch.dtype) -> None:
    """Compiled or not: where eps vanishes, the reference divides by zero, and so does a loop."""
    lengths = (3, 40_007)
    for scale in (1.0, 0.0):
        assert_steps_are_equal(
            TABLE[name].factory(),
            leaves(lengths, 1, dtype),
            lambda step, scale=scale: [
                scale * one for one in leaves(lengths, 50 * (step + 1), dtype)
            ],
        )


def strided(seed: int, count: int) -> Tensor:
    return noise(seed, count, 2)[:, 0]


def transposed(seed: int, count: int) -> Tensor:
    return noise(seed, count, 3).t()


def channels_last(seed: int, count: int) -> Tensor:
    return noise(seed, 2, 3, count, 2).contiguous(memory_format=torch.channels_last)


def of_complex(seed: int, count: int) -> Tensor:
    return noise(seed, count, dtype=torch.complex64)


def plain(seed: int, count: int) -> Tensor:
    return noise(seed, count)


def scalar(seed: int, count: int) -> Tensor:
    return noise(seed)


def none(seed: int, count: int) -> Tensor:
    return noise(seed, 0, count)


KINDS = [plain, strided, transposed, channels_last, of_complex, scalar, none]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("optimizer", [adamw(), lion(), RULES["reuses"]])
@pytest.mark.parametrize("kind", KINDS)
def test_layouts(kind: Any, optimizer: Optimizer, executor: Any) -> None:
    """Alone, and beside leaves that can be stepped where they lie."""
    if kind is of_complex and optimizer is RULES["reuses"]:
        optimizer = qhm()

    def made(seed: int, layout: Any) -> list[Tensor]:
        return [plain(seed, 5_000), layout(seed + 1, 300), plain(seed + 2, 3)]

    for layout in (kind, plain):  # of the gradient
        if kind in (plain, strided, of_complex) or layout is kind:
            same_shape = layout if kind is not of_complex else kind
            assert_steps_are_equal(
                optimizer,
                made(0, kind),
                lambda step, layout=same_shape: made(10 * (step + 1), layout),
                executor=executor,
            )


@pytest.mark.parametrize("executor", EXECUTORS)
def test_leaves_that_overlap_are_stepped_one_after_the_other(executor: Any) -> None:
    def stepped(name: Any) -> Any:
        memory = noise(0, 9_000)
        params = [memory[:6_000], memory[3_000:], memory[1:5], noise(1, 5_000)]
        one = qhm().using(executor=name)
        state = one.init(params)
        for step in range(3):
            one.update_(params, leaves((6_000, 6_000, 4, 5_000), 10 * (step + 1)), state)
        return copied(memory), state

    assert_equal(stepped(executor), stepped("reference"))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("count", [5, 5_000, 70_001])
def test_a_gradient_may_be_the_state_or_the_parameter(executor: Any, count: int) -> None:
    def stepped(name: Any) -> Any:
        param, other = noise(0, count), noise(1, count)
        one = sgd(0.1, momentum=0.9, nesterov=True).using(executor=name)
        state = one.init([param, other])
        one.update_([param, other], [noise(2, count), noise(3, count)], state)
        (buffer,) = state.leaves[0].stages[-1].momentum_buffer
        one.update_([param, other], [buffer, other], state)
        one.update_([param, other], [other, param], state)
        return [param, other], state

    assert_equal(stepped(executor), stepped("reference"))


@pytest.mark.parametrize("count", [2, 15, 16, 33, 300, 5_000])
def test_a_gradient_is_not_written_to(count: int) -> None:
    optimizer = RULES["swap"].using(executor="compile")
    param, grad = noise(0, count), noise(1, count)
    before, version = grad.clone(), grad._version
    optimizer.update_(param, grad, optimizer.init(param))
    optimizer.update(param, grad, optimizer.init(param))
    assert grad._version == version and torch.equal(grad, before)


def test_autograd_hears_of_what_is_written() -> None:
    optimizer = RULES["swap"].using(executor="compile")
    param = noise(0, 5_000)
    state = optimizer.init(param)
    versions = [one._version for one in (param, *state.leaves.stages[0])]
    optimizer.update_(param, noise(1, 5_000), state)
    after = [one._version for one in (param, *state.leaves.stages[0])]
    assert all(a > b for a, b in zip(after, versions, strict=True))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_many_leaves_in_one_call(executor: Any, in_threads: int, monkeypatch: Any) -> None:
    """Of odd lengths, empty ones among them."""
    calls: list[int] = []
    run = Program.run

    def noted(self: Program, table: Table, uniform: Any) -> None:
        calls.append(table.leaves)
        run(self, table, uniform)

    lengths = [(7 * k) % 211 for k in range(999)] + [33_333]
    optimizer = adamw()
    assert explained(optimizer, noise(0, 300)).startswith("exact")
    monkeypatch.setattr(Program, "run", noted)
    assert_steps_are_equal(
        optimizer,
        leaves(lengths, 0),
        lambda step: leaves(lengths, 2_000 * (step + 1)),
        executor=executor,
        steps=2,
    )
    assert calls == [sum(length > 0 for length in lengths)] * 4  # two steps, pure and in place


@pytest.mark.parametrize("executor", EXECUTORS)
def test_bound_with_gradients_anywhere_and_some_missing(executor: Any, in_threads: int) -> None:
    lengths = (70_001, 3, 0, 5_000, 129)
    optimizer = chain(clip_by_global_norm(0.5), qhm(0.1)) if in_threads == 2 else adamw(0.1)
    ours, theirs = leaves(lengths, 0), leaves(lengths, 0)
    bound = optimizer.using(executor=executor).bind(ours)
    other = optimizer.using(executor="blocked").bind(theirs)
    for step in range(4):
        grads: list[Any] = leaves(lengths, 10 * (step + 1))
        grads[step] = None
        bound.step(grads)
        other.step(grads)
        assert_equal((ours, bound.state), (theirs, other.state))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_several_threads_at_once(executor: Any) -> None:
    """Each with tensors of its own, by one loop that none has compiled yet."""
    optimizer = chain(clip_by_global_norm(0.7), adamw(weight_decay=0.3)).using(executor=executor)
    results: dict[int, Any] = {}
    barrier = threading.Barrier(4)

    def work(index: int) -> None:
        params = leaves((5_000, 33, 40_000), index)
        state = optimizer.init(params)
        barrier.wait()
        for step in range(10):
            optimizer.update_(params, leaves((5_000, 33, 40_000), 100 * step + index), state)
        results[index] = params, state

    workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    plain = optimizer.using(executor="blocked")
    for index in range(4):
        params = leaves((5_000, 33, 40_000), index)
        state = plain.init(params)
        for step in range(10):
            plain.update_(params, leaves((5_000, 33, 40_000), 100 * step + index), state)
        assert_equal(results[index], (params, state))


def test_a_thread_goes_on_while_a_step_is_made() -> None:
    """A step of 50 million elements lets go of the interpreter."""
    optimizer = sgd(0.1, momentum=0.9).using(executor="compile")
    param, grad = torch.zeros(50_000_000), torch.ones(50_000_000)
    bound = optimizer.bind([param])
    bound.step([grad])
    running, done = threading.Event(), threading.Event()
    counts: list[int] = []
    made: list[int] = []

    def count() -> None:
        turns = 0
        running.set()
        while not done.is_set():
            turns += 1
            made[:] = [turns]

    other = threading.Thread(target=count)
    other.start()
    running.wait()
    run = Program.bound

    def noted(self: Program, table: Any, uniform: Any) -> Any:
        call = run(self, table, uniform)

        def counted() -> None:
            before = made[0] if made else 0
            call()
            counts.append((made[0] if made else 0) - before)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "bound", noted)
        bound.step([grad])
    done.set()
    other.join()
    assert len(counts) == 1 and counts[0] > 100


def test_a_default_device_or_dtype_changes_nothing() -> None:
    optimizer, param = RULES["swap"].using(executor="compile"), noise(0, 50_000)
    state, grad = optimizer.init(param), noise(1, 50_000)
    want = optimizer.update(param, grad, state)
    with torch.device("meta"):
        assert_equal(optimizer.update(param, grad, state), want)
    torch.set_default_dtype(torch.float64)
    try:
        assert_equal(optimizer.update(param, grad, state), want)
    finally:
        torch.set_default_dtype(torch.float32)


def test_small_numbers_stay_small_numbers() -> None:
    """Some compilers make a library set all of its process to take them for zero."""
    optimizer = RULES["swap"].using(executor="compile")
    for count in (9, 1 << 16):
        param = torch.ones(count)
        optimizer.update(param, param, optimizer.init(param))
        assert bool((torch.full((64,), 1e-40) * 0.5 > 0).all())
