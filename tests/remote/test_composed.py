"""Composed optimizers over threads, which equal one process for any placement."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import (
    DistributedOptimizer,
    Optimizer,
    TorchOptimizer,
    accumulate,
    adamw,
    chain,
    clip_by_global_norm,
    masked,
    matching,
    partition,
    prodigy,
    sgd,
    sophia,
)
from functional_optim.frontends.local_optimizer import local_optimizer
from functional_optim.remote import ThreadTransport, distributed_optimizer
from functional_optim.remote import workers as remote_workers
from tests.choices import case
from tests.composition.test_views import POLYAK
from tests.composition.trees import COMPOSED, HOLES, STEPS, grads_at, kind, run_of
from tests.tensors import assert_same

from .composed_laws import BATCHES_OF_TWO, MORE, is_one_of_the_serial_orders, named, placement

over_threads = DistributedOptimizer.over_threads


def detached(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in params.items()}


@pytest.mark.parametrize("name", MORE)
def test_over_workers_it_is_the_optimizer_itself(name: str) -> None:
    """State dicts move between workers, to a TorchOptimizer, and back."""
    chosen = MORE[name]()
    want, state = run_of(chosen, missing=HOLES)
    for workers in (1, 2, 3):
        with case(workers=workers):
            params = named()
            optimizer = over_threads(chosen, params, placement(workers))
            saved = stepped(optimizer, range(3))
            twin = TorchOptimizer(params.items(), chosen)
            twin.load_state_dict(saved)
            for path, grad in grads_at(3, missing=HOLES).items():
                params[path].grad = grad
            twin.step()
            optimizer = over_threads(chosen, params, placement(4 - workers))
            optimizer.load_state_dict(twin.state_dict())
            saved = stepped(optimizer, range(4, STEPS))
            assert_same(detached(params), want)
            twin.load_state_dict(saved)
            assert twin.shared == chosen.shared(state)


def stepped(optimizer: DistributedOptimizer, numbers: range) -> dict[str, Any]:
    """Make these steps, close the optimizer, and return its state."""
    for step in numbers:
        optimizer.step(grads_at(step, missing=HOLES))
    saved = optimizer.state_dict()
    optimizer.close()
    return saved


@pytest.mark.parametrize("name", MORE)
def test_here_gradients_are_in_the_order_of_the_groups(name: str) -> None:
    """Gradients have the order of the groups, also if parts divide the groups (fault 43)."""
    chosen, params = MORE[name](), named()
    local = local_optimizer(chosen, params.items())
    for step in range(STEPS):
        if step == 3:
            saved = copy.deepcopy(local.state_dict())
            local = local_optimizer(chosen, params.items())
            local.load_state_dict(saved)
        grads, names = (
            grads_at(step, missing=HOLES),
            {id(one): name for name, one in params.items()},
        )
        local.step_by([grads[names[id(one)]] for one in local.params])
    assert_same(detached(params), run_of(chosen, missing=HOLES)[0])
    params = named()
    optimizer = over_threads(chosen, params, placement(2))
    optimizer.step(list(grads_at(0).values()))
    assert list(optimizer.snapshot().parameters) == list(params)
    optimizer.close()
    assert_same(detached(params), run_of(chosen, 1)[0])


def test_parts_that_share_totals_step_as_one() -> None:
    """A total can also be a vector, to which each parameter adds one row."""
    for name in ("clip over parts", "sam", "prodigy"):
        with case(name=name):
            chosen, params = MORE[name](), named()
            names = list(params)
            parts = [local_optimizer(chosen, [(one, params[one])]) for one in names]
            for step in range(3):
                grads = grads_at(step)
                totals: list[Tensor] = []
                for _ in range(parts[0].measured_stages):
                    added = [
                        part.measure([grads[one]], measured=totals)
                        for part, one in zip(parts, names, strict=True)
                    ]
                    totals.append(torch.cat(added).sum(0))
                for part, one in zip(parts, names, strict=True):
                    part.step_by([grads[one]], measured=totals)
            torch.testing.assert_close(detached(params), run_of(chosen, 3)[0])
            assert parts[0].state_dict()["param_groups"][0].keys() >= {"lr"}


def test_a_scheduler_of_torch_changes_every_part() -> None:
    params, twins, chosen = named(), named(), COMPOSED["batches of parts"]()
    optimizer = over_threads(chosen, params, placement(3))
    twin = TorchOptimizer(twins.items(), chosen)
    both: list[Any] = [optimizer, twin]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in both]
    for step in range(4):
        for path, grad in grads_at(step).items():
            twins[path].grad = grad
        optimizer.step(grads_at(step))
        twin.step()
        for one in schedulers:
            one.step()
    assert [one["lr"] for one in optimizer.param_groups] == [one["lr"] for one in twin.param_groups]
    optimizer.close()
    assert_same(detached(params), detached(twins))


def test_what_workers_cannot_agree_on_is_refused() -> None:
    """A refused setting changes nothing."""
    params, where = named(), placement(2)
    inside = partition({"matrices": chain(accumulate(2), sgd()), "rest": adamw()}, kind)
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (
            TypeError,
            "DistributedOptimizer takes only gradients, but polyak also needs 'loss'",
            lambda: over_threads(chain(POLYAK(lr=1.0)), params, where),
        ),
        (
            TypeError,
            "scale_by_sophia also needs 'hessian': use update, update_ or TorchOptimizer",
            lambda: over_threads(sophia(), params, where),
        ),
        (
            TypeError,
            "given its gradients takes only gradients, but polyak also needs 'loss'",
            lambda: local_optimizer(chain(POLYAK(lr=1.0)), params.items()),
        ),
        (TypeError, "accumulate .* does not act on", lambda: over_threads(inside, params, where)),
        (
            ValueError,
            "prodigy .* d_coef must be the same for all of them, got 1.0 and 0.5",
            lambda: over_threads(prodigy().override(matching("*bias"), d_coef=0.5), params, where),
        ),
        (
            ValueError,
            "no rule acts",
            lambda: over_threads(masked(sgd(), matching("*bias")), params, where),
        ),
    ]
    for kind_, text, make in wrong:
        with case(text=text), pytest.raises(kind_, match=text):
            make()
    pairs_ = list(params.items())
    # No worker sees both groups.
    where = {name: f"ps{place // 2}" for place, name in enumerate(params)}
    optimizer = over_threads(prodigy(), [{"params": pairs_[:2]}, {"params": pairs_[2:]}], where)
    optimizer.step(grads_at(0))
    before, kept = detached(params), optimizer.state_dict()
    optimizer.param_groups[1]["d_coef"] = 0.5
    with pytest.raises(ValueError, match="prodigy .* d_coef must be the same"):
        optimizer.step(grads_at(1))
    optimizer.param_groups[1]["d_coef"] = optimizer.param_groups[0]["d_coef"]
    assert_same(detached(params), before)
    assert_same(optimizer.state_dict()["state"], kept["state"])
    wrong_state = optimizer.state_dict()
    del wrong_state["param_groups"][1]["shared_step"]
    with pytest.raises(ValueError, match="lacks the scalars"):
        optimizer.load_state_dict(wrong_state)
    assert_same(optimizer.state_dict()["state"], kept["state"])
    optimizer.close()
    local = local_optimizer(inside, pairs_)  # one process has no other worker to agree with
    with pytest.raises(ValueError, match="got 1 gradients for 4 parameters"):
        local.step_by([None])
    with pytest.raises(ValueError, match="no such stage"):
        local.measure([None] * 4)


def test_totals_are_summed_in_the_order_of_the_parameters() -> None:
    """Totals equal those of one process bit for bit, for any placement and any partition."""
    # The small squares are lost if each is added to 1 alone, but not if they are added together.
    grads = {"a": 1.0, **dict.fromkeys("bcdefghi", 1e-08)}
    seen = []
    for parts in (1, 2, 3):
        params = {name: torch.zeros((), dtype=torch.float64) for name in grads}
        where = {name: f"ps{place % parts}" for place, name in enumerate(params)}
        optimizer = over_threads(chain(clip_by_global_norm(0.5), apart()), params, where)
        optimizer.step({name: torch.tensor(one).double() for name, one in grads.items()})
        optimizer.close()
        seen.append(params)
    twin: Any = {name: torch.zeros((), dtype=torch.float64) for name in grads}
    optimizer_ = chain(clip_by_global_norm(0.5), apart())
    given = {name: torch.tensor(one).double() for name, one in grads.items()}
    want, _ = optimizer_.update(twin, given, optimizer_.init(twin))
    for params in seen:
        assert_same(params, want)


def apart() -> Optimizer:
    labels = {"first": sgd(lr=1.0), "rest": sgd(lr=1.0)}
    return partition(labels, lambda path, shape: "first" if path == ("a",) else "rest")


class Unordered(ThreadTransport):
    """Transport that delays the first step of "ps0" until an event, past later calls."""

    keeps_order = False
    sent, go = threading.Event(), threading.Event()

    def call(self, handle: Any, method: str, *args: Any) -> Any:
        if method != "step" or handle.worker != "ps0" or self.sent.is_set():
            return super().call(handle, method, *args)
        self.sent.set()
        pool = ThreadPoolExecutor(1)
        return pool.submit(self._late, handle, *args)

    def _late(self, handle: Any, *args: Any) -> None:
        assert self.go.wait(60)
        handle.target.step(*args)


def test_a_step_that_needs_totals_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls can overtake each other, but totals must be of the state after the earlier step."""

    def wait_and_tell(futures: Any) -> None:
        if futures:  # the first step has no step before it
            Unordered.go.set()
        wait(futures)

    monkeypatch.setattr(distributed_optimizer, "ThreadTransport", Unordered)
    monkeypatch.setattr(remote_workers, "wait", wait_and_tell)
    params = named()
    optimizer = over_threads(BATCHES_OF_TWO, params, placement(2))
    calls = [threading.Thread(target=optimizer.step, args=(grads_at(k),)) for k in range(2)]
    calls[0].start()
    assert Unordered.sent.wait(60)
    calls[1].start()
    calls[1].join(60)
    Unordered.go.set()
    calls[0].join(60)
    optimizer.close()
    is_one_of_the_serial_orders(detached(params), range(2))
