"""DistributedOptimizer over threads: any class, failures, refusals, and counters."""

import copy
import pickle
import threading
from typing import Any

import pytest
import torch

import sharding
from functional_optim import (
    DistributedOptimizer,
    sgd,
)
from functional_optim.remote import WorkerError
from functional_optim.remote.staleness import GradientVersions
from tests.choices import case

from .support import assert_same, gradients, noise, parameters, placement

over_threads = DistributedOptimizer.over_threads


class Doubling(torch.optim.Optimizer):
    """Optimizer class without functional equivalent."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})


def test_a_class_without_equivalent_has_one_warning_with_the_callers_line() -> None:
    with pytest.warns(UserWarning, match="Doubling.* has no functional equivalent") as seen:
        optimizer = over_threads(Doubling, parameters(), placement(2), lr=0.25)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert not optimizer.is_functional_optim
    optimizer.close()


class Failing(Doubling):
    """Optimizer class that fails in its constructor, or in each step."""

    def __init__(self, params: Any, where: str) -> None:
        super().__init__(params)
        self.where = where
        if where == "made":
            raise LookupError("nothing to be found")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise LookupError(f"no step of {len(self.param_groups[0]['params'])}")


@pytest.mark.filterwarnings("ignore:.*no functional equivalent")
def test_errors_of_all_workers_are_told() -> None:
    with pytest.raises(WorkerError, match="constructor failed on 2 of 2 workers") as caught:
        over_threads(Failing, parameters(), placement(2), where="made")
    assert caught.value.errors.keys() == {"ps0", "ps1"}
    assert "ps1: LookupError: nothing to be found" in str(caught.value)
    optimizer = over_threads(Failing, parameters(), {**placement(2), "scale": "ps1"}, where="step")
    with pytest.raises(WorkerError) as caught:
        optimizer.step(gradients(0))
    text = str(caught.value)
    assert "step failed on 2 of 2 workers" in text
    assert "ps0: LookupError: no step of 2" in text
    assert "ps1: LookupError: no step of 2" in text
    optimizer.close()


def test_bad_input_is_named_before_anything_is_changed() -> None:
    params = parameters()
    where = placement(2)
    lost = {name: worker for name, worker in where.items() if name != "scale"}
    cut = sharding.plan(params, 3, "elements")
    wrong: list[tuple[type[Exception], str, Any]] = [
        (
            ValueError,
            "1 of 4 parameters are on no worker .'scale'.",
            lambda: over_threads(sgd, params, lost),
        ),
        (
            ValueError,
            "no such parameter",
            lambda: over_threads(sgd, params, {**where, "other": "ps0"}),
        ),
        (TypeError, "must be a name", lambda: over_threads(sgd, params, {**where, "scale": 3})),  # type: ignore[dict-item]
        (TypeError, "must have names", lambda: over_threads(sgd, list(params.values()), where)),
        (ValueError, "no parameters", lambda: over_threads(sgd, {}, where)),
        (ValueError, "cuts 'embed.weight'", lambda: over_threads(sgd, params, cut)),
        (ValueError, "lr must be", lambda: over_threads(sgd, params, where, lr=-1.0)),
        (TypeError, "momentun", lambda: over_threads(torch.optim.SGD, params, where, momentun=1)),
        (TypeError, "must be a class", lambda: over_threads(3, params, where)),
    ]
    for kind, text, make in wrong:
        with case(text=text), pytest.raises(kind, match=text):
            make()
    optimizer = over_threads(sgd, params, where, lr=0.1)
    odd = {**gradients(0), "scale": noise(0, 2)}
    for kind, text, given_now in (
        (TypeError, "have no distributed autograd contexts", 7),
        (TypeError, "step takes gradients", 7.5),
        (ValueError, "got 3 gradients for 4", [None] * 3),
        (ValueError, "'scal'", {"scal": noise(0)}),
        (ValueError, "'scale' has shape", odd),
    ):
        with case(text=text), pytest.raises(kind, match=text):
            optimizer.step(given_now)
    with pytest.raises(NotImplementedError, match="cannot be added"):
        optimizer.add_param_group({"params": [noise(0)]})
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="step failed on 2 of 2 workers:\n  ps0: ValueError: "):
        optimizer.step(gradients(0))
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.close()
    with pytest.raises(RuntimeError, match="this optimizer is closed"):
        optimizer.step(gradients(0))
    assert_same(params, parameters())


def test_counters() -> None:
    optimizer = over_threads(sgd, parameters(), placement(2), lr=0.1)
    optimizer.step(gradients(0))
    optimizer.step(gradients(1, ("embed.weight",)))
    found = optimizer.counters()
    at_ps0 = 4 * (15 + 4) + 4 * 4  # embedding and bias, then only the bias
    at_ps1 = 2 * 4 * (16 + 1)
    assert {worker: one[:3] for worker, one in found.items()} == {
        "ps0": (2, 0, at_ps0),
        "ps1": (2, 0, at_ps1),
    }
    optimizer.close()


class Counting(torch.optim.Optimizer):
    """Optimizer class that counts its steps in its groups, under an option."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for param in filter(lambda one: one.grad is not None, group["params"]):
                param.sub_(param.grad, alpha=group["lr"] / group["count"])


@pytest.mark.filterwarnings("ignore:.*no functional equivalent")
def test_what_a_class_writes_into_its_groups_is_saved() -> None:
    """A resumed run counts on from the counts of the workers, with another placement too."""
    params, theirs = parameters(), parameters()
    single, optimizer = Counting(theirs.values()), over_threads(Counting, params, placement(2))
    for step in range(6):
        if step == 2:
            optimizer.param_groups[0]["lr"] = single.param_groups[0]["lr"] = 0.25
        if step in (3, 4):
            saved = optimizer.state_dict()
            assert saved["param_groups"][0]["count"] == step
            optimizer.close()
            optimizer = over_threads(Counting, params, placement(step - 2), lr=9.0)
            optimizer.load_state_dict(saved)
        grads = gradients(step)
        optimizer.step(grads)
        for name, param in theirs.items():
            param.grad = grads.get(name)
        single.step()
        assert_same(params, theirs)
    optimizer.close()


def test_a_copy_is_refused() -> None:
    """The state is on the workers, so a copy would have none."""
    optimizer = over_threads(sgd, parameters(), placement(2), lr=0.1)
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="its state is on its workers"):
            make(optimizer)
    optimizer.close()


class Waiting(Doubling):
    """Optimizer class whose steps wait for an event."""

    go = threading.Event()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.go.wait(60)


@pytest.mark.filterwarnings("ignore:.*no functional equivalent")
def test_steps_that_wait_are_counted() -> None:
    optimizer = over_threads(Waiting, parameters(), placement(2))
    sources = optimizer._workers.locate(gradients(0))
    taken = dict.fromkeys(optimizer.workers, GradientVersions())
    groups = optimizer.param_groups
    sent = [optimizer._workers.send_step(sources, groups, taken) for _ in range(3)]
    Waiting.go.set()
    for asked in sent:
        for future in asked.values():
            future.result(60)
    assert [(one.steps, one.waits) for one in optimizer.counters().values()] == [(3, 2)] * 2
    optimizer.close()
