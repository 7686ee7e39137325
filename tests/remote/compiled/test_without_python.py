"""Steps of a worker as one program over all parameters, with and without TorchScript."""

from functools import partial
from typing import Any

import pytest
import torch

from functional_optim import Optimizer, adamw, chain, clip_by_global_norm, qhm
from functional_optim.frontends.local_optimizer import local_optimizer, resolve_recipe
from functional_optim.kernels.errors import UnscriptableError
from functional_optim.remote.thread_transport import make_worker
from functional_optim.remote.worker import WorkerGroup, WorkerOptimizer
from tests.choices import case
from tests.steady import calls_of, every_call_of

from ..support import assert_same, gradients, locally, noise, parameters

EXECUTORS: tuple[Any, ...] = ("compiled", "blocked", "auto")


def worker_of(optimizer: Any, params: dict[str, torch.Tensor]) -> WorkerOptimizer:
    share = WorkerGroup(0, list(params.items()), {})
    return make_worker(resolve_recipe(optimizer, (), {}), [share])


def stepped(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    params = parameters()
    worker = worker_of(optimizer, params)
    options = worker.describe()[1]
    for step in range(3):
        given = list(gradients(step, ("scale",) if step == 1 else ()).values())
        totals = [worker.measure(given, options, ()).sum() for _ in range(worker.describe()[0])]
        worker.step(given, options, totals)
    return params


def calls_of_a_step(executor: Any, count: int) -> int:
    """Return the number of Python calls in one step of ``count`` parameters."""
    params = {str(k): noise(k, 5) for k in range(count)}
    worker = worker_of(adamw(lr=0.1).using(executor=executor), params)
    grads = [noise(100 + k, 5) for k in range(count)]
    options = worker.describe()[1]
    for _ in range(4):
        worker.step(grads, options)
    return every_call_of(lambda: worker.step(grads, options))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_step_of_more_parameters_is_no_more_python(executor: Any) -> None:
    few, many = (calls_of_a_step(executor, count) for count in (4, 40))
    assert few > 0
    assert many - few < 10  # 36 more parameters


STEPS = [gradients(0), gradients(1, ("scale",)), gradients(2)]


def test_every_way_to_run_it_gives_the_same_bits() -> None:
    clipped = chain(clip_by_global_norm(0.1), adamw(lr=0.1))
    for optimizer in (adamw(lr=0.1), qhm(lr=0.1), clipped):
        for executor in EXECUTORS:
            with case(optimizer=optimizer, executor=executor):
                found = stepped(optimizer.using(executor=executor))
                assert_same(found, locally(optimizer, STEPS))


def test_without_torchscript_the_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only ``optimizer.script`` raises an error, as on a Python that torch.jit does not support."""

    def refused(*_: Any, **__: Any) -> Any:
        raise RuntimeError("torch.jit.script is not supported on this Python")

    for name in ("script", "trace", "CompilationUnit"):
        monkeypatch.setattr(torch.jit, name, refused)
    optimizer = adamw(lr=0.1, betas=(0.5, 0.75))
    for executor in ("compiled", "blocked", "auto"):
        with case(executor=executor):
            found = stepped(optimizer.using(executor=executor))  # type: ignore[arg-type]
            assert_same(found, locally(optimizer, STEPS))
    with pytest.raises(UnscriptableError, match="not supported on this Python.* by update_"):
        _never_scripted().script(parameters())


def _never_scripted() -> Optimizer:
    """Return a chain that no other test has compiled to a program."""
    return chain(clip_by_global_norm(0.1), clip_by_global_norm(0.2), qhm(lr=0.1), adamw(lr=0.1))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_addends_of_more_parameters_are_no_more_python(executor: Any) -> None:
    counts = []
    for count in (4, 40):
        params = [noise(k, 5) for k in range(count)]
        optimizer = chain(clip_by_global_norm(1.0), adamw(lr=0.1)).using(executor=executor)
        local = local_optimizer(optimizer, params)
        grads = [noise(100 + k, 5) for k in range(count)]
        for _ in range(4):
            local.step_by(grads, measured=[local.measure(grads).sum()])
        found = local.measure(grads)
        alone = torch.stack([one.double().square().sum() for one in grads])
        torch.testing.assert_close(found, alone)
        counts.append(calls_of(partial(local.measure, grads)))
    assert counts[1] == counts[0]
