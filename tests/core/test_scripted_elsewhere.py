"""The scripted program away from Python: saved and loaded, inside other TorchScript, in threads."""

import dataclasses
import io
import itertools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, ScriptedOptimizer, adam, chain, clip_by_global_norm, rmsprop
from functional_optim.executors.script_compiler import script

from .support import CHAINS, VARIANTS, assert_same, noise

EVERY = {**VARIANTS, **CHAINS}

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.(save|load)` is deprecated")


def _tensors(step: int) -> list[Tensor]:
    return [noise(10 * step, 3, 2), noise(10 * step + 1, 4), noise(10 * step + 2, 2).mul(1 + 1j)]


def _reloaded(program: ScriptedOptimizer) -> Any:
    buffer = io.BytesIO()
    torch.jit.save(program.module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


@pytest.mark.parametrize("name", EVERY)
def test_a_saved_program_goes_on_bit_for_bit(name: str) -> None:
    params = _tensors(0)
    program = EVERY[name].script(params)
    program.step(_tensors(1))
    module = _reloaded(program)
    assert_same(list(module.params), params)
    for step in (2, 3):
        grads: list[Any] = _tensors(step)
        grads[0] = None if step == 2 else grads[0]
        program.step(grads)
        module.step(grads)
    assert_same(list(module.params), params)
    assert [int(step) for step in module.steps] == [2, 3, 3]


def test_a_loaded_program_is_another_one() -> None:
    params = _tensors(0)
    program = adam(0.1).script(params)
    module = _reloaded(program)
    module.step(_tensors(1))
    assert_same(params, _tensors(0))
    assert int(program.state.leaves[0].step) == 0


def test_a_loaded_program_still_steps_single_parameters_and_checks() -> None:
    program = adam(0.1).script(_tensors(0))
    module = _reloaded(program)
    module.step_param(module.params[1], _tensors(1)[1])
    program.step_param(program.params[1], _tensors(1)[1])
    assert_same(list(module.params), program.params)
    with pytest.raises(torch.jit.Error, match="got 1 gradients for 3 parameters"):
        module.step([None])


def test_hyper_parameters_are_saved_too() -> None:
    params, wanted = _tensors(0), _tensors(0)
    program = adam(0.1).script(params)
    program.set_hyper(lr=0.7)
    module = _reloaded(program)
    module.step(_tensors(1))
    adam(0.7).update_(wanted, _tensors(1), adam().init(wanted))
    assert_same(list(module.params), wanted)


class Trainer(torch.nn.Module):
    """Other TorchScript that owns a program and calls it."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        self.program = program

    def forward(self, gradients: list[Tensor], times: int) -> Tensor:
        optional: list[Tensor | None] = []
        for gradient in gradients:
            optional.append(gradient)  # noqa: PERF402  TorchScript's lists are of one type
        for _ in range(times):
            self.program.step(optional)
        return self.program.params[0]


@pytest.mark.parametrize("name", ["adam amsgrad", "clipped twice"])
def test_other_torchscript_calls_it(name: str) -> None:
    params, wanted = _tensors(0), _tensors(0)
    trainer = script(Trainer(EVERY[name].script(params).module))
    first = trainer(_tensors(1), 3)
    state = EVERY[name].init(wanted)
    for _ in range(3):
        EVERY[name].update_(wanted, _tensors(1), state)
    assert_same(params, wanted)
    assert_same(first, wanted[0])


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Threads that change places as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def _in_threads(work: Any, count: int = 4) -> None:
    """Run ``work(index)`` in threads that start together; raise what the first of them raised."""
    barrier, errors = threading.Barrier(count), []

    def run(index: int) -> None:
        try:
            barrier.wait()
            work(index)
        except Exception as error:  # noqa: BLE001  handed to the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.usefixtures("eager_switching")
def test_programs_of_one_chain_step_in_threads() -> None:
    optimizer = chain(clip_by_global_norm(1.0), rmsprop(0.1, momentum=0.9, centered=True))
    wanted = _tensors(0)
    state = optimizer.init(wanted)
    for step in range(20):
        optimizer.update_(wanted, _tensors(step + 1), state)
    results = [_tensors(0) for _ in range(4)]
    programs = [optimizer.script(params) for params in results]

    def work(index: int) -> None:
        for step in range(20):
            programs[index].step(_tensors(step + 1))

    _in_threads(work)
    for params in results:
        assert_same(params, wanted)


_numbers = itertools.count()


def _new_chain() -> Optimizer:
    """A chain that nobody has scripted: its rule has a name of its own."""
    *before, last = rmsprop(0.1, momentum=0.9, centered=True).links
    stage = dataclasses.replace(last.stage, name=f"rmsprop_{next(_numbers)}")
    return chain(*before, last._replace(stage=stage))


ROUNDS = 10
"""Each with a program of its own: threads meet inside the compiler in some of them."""


@pytest.mark.usefixtures("eager_switching")
def test_a_chain_is_scripted_by_several_threads_at_once() -> None:
    """The first optimizers of the workers of one process: all compile the same program."""
    for _ in range(ROUNDS):
        optimizer = _new_chain()
        results = [_tensors(0) for _ in range(4)]
        _in_threads(lambda i, o=optimizer, r=results: o.script(r[i]).step(_tensors(1)))
        for params in results[1:]:
            assert_same(params, results[0])


@pytest.mark.usefixtures("eager_switching")
def test_the_executor_compiles_in_several_threads_at_once() -> None:
    for _ in range(ROUNDS):
        optimizer = _new_chain().using(executor="script")
        trees = [(_tensors(0), _tensors(1), optimizer.init(_tensors(0))) for _ in range(4)]
        _in_threads(lambda i, o=optimizer, t=trees: o.update_(*t[i]))
        for params, _, _ in trees[1:]:
            assert_same(params, trees[0][0])
