"""DistributedOptimizer over threads: the numbers of one process, whatever the placement."""

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import sharding
from functional_optim import (
    DistributedOptimizer,
    TorchOptimizer,
    adamw,
    chain,
    clip_by_global_norm,
    sgd,
)
from functional_optim.remote import WorkerError
from functional_optim.remote.staleness import Taken
from functional_optim.testing.chain_cases import ONE_CHAIN
from tests.choices import case, examples, pairs

from .support import SHAPES, assert_same, gradients, locally, noise, parameters, placement

over_threads = DistributedOptimizer.over_threads


@pytest.mark.parametrize("name", ONE_CHAIN)
@examples(3)
@given(
    data=st.data(),
    workers=st.integers(1, 4),
    missing=st.sampled_from([(), ("scale",), tuple(SHAPES)]),
)
def test_every_optimizer_equals_the_local_run(
    name: str, data: st.DataObject, workers: int, missing: tuple[str, ...]
) -> None:
    options = data.draw(ONE_CHAIN[name].options)
    steps = [gradients(0), gradients(1, missing), gradients(2)]
    want = locally(ONE_CHAIN[name].factory(**options), steps)
    # RMSprop, centered and with alpha 0, takes roots of what rounding made negative, as torch does.
    assume(all(bool(one.isfinite().all()) for one in want.values()))
    params = parameters()
    optimizer = over_threads(ONE_CHAIN[name].factory, params, placement(workers), **options)
    for one in steps:
        optimizer.step(one)
    optimizer.close()
    assert_same(params, want)
    assert all(param.grad is None for param in params.values())


def test_every_registered_class_is_torchs_to_the_bit() -> None:
    for one in ONE_CHAIN.values():
        if one.oracle is None:
            continue
        with case(cls=one.oracle):
            params, twins = parameters(), parameters()
            optimizer = over_threads(one.oracle, params, placement(3))
            twin = one.oracle(twins.values(), foreach=False)
            for step in range(3):
                given_now = gradients(step, ("hidden.bias",) if step == 1 else ())
                optimizer.step(list(given_now.values()))
                for name, grad in given_now.items():
                    twins[name].grad = grad
                twin.step()
            assert_same(params, twins)
            assert optimizer.is_functional_optim
            saved, kept = optimizer.state_dict(), twin.state_dict()
            assert (
                saved["param_groups"][0].keys() - {"param_names"} == kept["param_groups"][0].keys()
            )
            optimizer.close()


def test_eight_threads_at_once_make_one_of_the_serial_orders() -> None:
    """Momentum, so that each order has other bits; three workers, so that all must agree on one."""
    steps = [gradients(step) for step in range(4)]
    params = parameters()
    optimizer = over_threads(sgd, params, placement(3), lr=0.1, momentum=0.9)
    begin = threading.Barrier(8)
    of_four = itertools.cycle(steps)
    turns = [next(of_four) for _ in range(8)]

    def trainer(own: Any) -> None:
        begin.wait()
        optimizer.step(own)

    threads = [threading.Thread(target=trainer, args=(one,)) for one in turns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    counted = optimizer.counters()
    optimizer.close()
    assert {one.steps for one in counted.values()} == {8}
    found = torch.cat([param.detach().reshape(-1) for param in params.values()])
    orders = set(itertools.permutations((0, 1, 2, 3) * 2))
    wanted = all_orders(steps, orders)
    assert any(torch.equal(found, one) for one in wanted)


def all_orders(steps: list[Any], orders: set[tuple[int, ...]]) -> list[Tensor]:
    """Elementwise, in the rule's own operations; all orders at once, one row each."""
    start = torch.cat([one.detach().reshape(-1) for one in parameters().values()])
    flat = torch.stack([torch.cat([g.reshape(-1) for g in one.values()]) for one in steps])
    which = torch.tensor(sorted(orders))
    params = start.expand(len(which), -1).clone()
    momentum = torch.zeros_like(params)
    for turn in range(which.shape[1]):
        grad = flat[which[:, turn]]
        momentum = grad.clone() if turn == 0 else momentum.mul(0.9).add(grad)
        params = params.add(momentum, alpha=-0.1)
    return list(params)


def test_a_plan_places_parameters() -> None:
    params = parameters()
    plan = sharding.plan(params, 2, "greedy")
    optimizer = over_threads(adamw, params, plan, lr=0.1)
    assert sorted(optimizer.workers) == ["rank0", "rank1"]
    optimizer.step(gradients(0))
    optimizer.close()
    assert_same(params, locally(adamw(lr=0.1), [gradients(0)]))


def test_groups_and_schedulers() -> None:
    """Options reach the workers with the next step; torch's scheduler computes them."""
    for options in pairs(optimizer=[torch.optim.AdamW, torch.optim.SGD], workers=[1, 3]):
        with case(**options):
            params, twins = parameters(), parameters()

            def grouped(own: Any) -> list[dict[str, Any]]:
                named = list(own.items())
                return [{"params": named[:2]}, {"params": named[2:], "weight_decay": 0.5}]

            where = placement(options["workers"])
            optimizer = over_threads(options["optimizer"], grouped(params), where, lr=0.1)
            twin = options["optimizer"](grouped(twins), lr=0.1, foreach=False)
            schedulers = [
                torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in (optimizer, twin)
            ]
            for step in range(3):
                given_now = gradients(step)
                optimizer.step(given_now)
                for name, grad in given_now.items():
                    twins[name].grad = grad
                twin.step()
                for one in schedulers:
                    one.step()
            optimizer.close()
            assert_same(params, twins)


def test_state_moves_to_other_workers_and_to_torch_and_back() -> None:
    params = parameters()
    optimizer = over_threads(torch.optim.AdamW, params, placement(3), lr=0.1, amsgrad=True)
    twins = parameters()
    twin = torch.optim.AdamW(twins.items(), lr=0.1, amsgrad=True, foreach=False)
    steps = iter(range(100))

    def both(one: Any, other: torch.optim.Optimizer) -> None:
        given_now = gradients(next(steps))
        one.step(given_now)
        for name, grad in given_now.items():
            twins[name].grad = grad
        other.step()

    both(optimizer, twin)
    saved = optimizer.state_dict()
    assert saved["workers"]["ps0"] == ["embed.weight", "scale"]
    assert saved["param_groups"][0]["param_names"] == list(SHAPES)
    optimizer.close()

    moved = over_threads(torch.optim.AdamW, params, placement(2, shift=1), lr=0.7)
    moved.load_state_dict(saved)
    assert moved.param_groups[0]["lr"] == 0.1
    assert moved.param_groups[0]["amsgrad"]
    both(moved, twin)
    plain = torch.optim.AdamW(twins.items(), lr=0.9, foreach=False)
    plain.load_state_dict(moved.state_dict())
    both(moved, plain)
    moved.load_state_dict(plain.state_dict())
    both(moved, plain)
    moved.close()
    assert_same(params, twins)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_state_goes_to_other_front_ends_and_back() -> None:
    params = parameters()
    optimizer = over_threads(torch.optim.AdamW, params, placement(3), lr=0.1)
    optimizer.step(gradients(0))
    copies: list[dict[str, Tensor]] = [
        {name: param.detach().clone().requires_grad_() for name, param in params.items()}
        for _ in range(2)
    ]
    others = (
        sharding.ZeroRedundancyOptimizer(copies[0].items(), torch.optim.AdamW, lr=0.9),
        TorchOptimizer(copies[1].items(), adamw(lr=0.9)),
    )
    saved = optimizer.state_dict()
    for other in others:
        other.load_state_dict(saved)
    for step in (1, 2):
        optimizer.step(gradients(step))
        for copy, other in zip(copies, others, strict=True):
            for name, grad in gradients(step).items():
                copy[name].grad = grad
            other.step()
            assert_same(params, copy)
        others[0].consolidate_state_dict()
        for other in others:
            optimizer.load_state_dict(other.state_dict())
    optimizer.close()


def test_sparse_gradients_touch_their_rows() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    before = table.weight.detach().clone()
    optimizer = over_threads(torch.optim.SGD, table, {"weight": "ps0"}, lr=1.0)
    grads = list(torch.autograd.grad(table(torch.tensor([1, 1, 3])).sum(), [table.weight]))
    assert grads[0].is_sparse
    norm = optimizer.clip_grad_norm_(grads, 1e9)
    torch.testing.assert_close(norm, torch.tensor(10.0, dtype=torch.float64).sqrt())
    optimizer.step(grads)
    optimizer.close()
    moved = (before - table.weight.detach())[:, 0]
    torch.testing.assert_close(moved, torch.tensor([0.0, 2.0, 0.0, 1.0, 0.0]))


def test_a_state_that_one_worker_refuses_changes_none() -> None:
    params = parameters()
    optimizer = over_threads(torch.optim.AdamW, params, placement(2), lr=0.1)
    optimizer.step(gradients(0))
    before = optimizer.state_dict()
    wrong = optimizer.state_dict()
    wrong["param_groups"][0]["lr"] = 0.9
    wrong["state"][0]["exp_avg"].zero_()
    wrong["state"][1]["exp_avg"] = torch.zeros(7)
    with pytest.raises(ValueError, match=r"load_state_dict failed on 1 of 2 workers:\n  ps1: "):
        optimizer.load_state_dict(wrong)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, entries in before["state"].items():
        assert all(
            torch.equal(value, after["state"][number][key]) for key, value in entries.items()
        )
    optimizer.close()


def test_clipping_is_over_all_workers() -> None:
    for options in pairs(norm=[2.0, 1.0, float("inf")], workers=[1, 4], limit=[0.5, 1e9]):
        with case(**options):
            optimizer = over_threads(sgd, parameters(), placement(options["workers"]))
            ours, theirs = gradients(0, ("scale",)), parameters()
            for name, grad in gradients(0, ("scale",)).items():
                theirs[name].grad = grad
            norm = optimizer.clip_grad_norm_(ours, options["limit"], options["norm"])
            want = torch.nn.utils.clip_grad_norm_(
                theirs.values(), options["limit"], options["norm"]
            )
            torch.testing.assert_close(norm.float(), want)
            for name, grad in ours.items():
                torch.testing.assert_close(grad, theirs[name].grad)
            alone = over_threads(sgd, parameters(), placement(1))
            assert alone.clip_grad_norm_(gradients(0, ("scale",)), 1e9, options["norm"]) == norm
            optimizer.close()
            alone.close()


def test_a_chain_that_clips_sees_all_workers() -> None:
    made = chain(clip_by_global_norm(0.1), adamw(lr=0.1))
    results = []
    for workers in (1, 2, 4):
        params = parameters()
        optimizer = over_threads(made, params, placement(workers))
        for step in range(2):
            optimizer.step(gradients(step))
        optimizer.close()
        results.append(params)
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_a_scaler_skips_the_step_on_all_workers() -> None:
    params = parameters()
    optimizer = over_threads(sgd, params, placement(2), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaled = {name: grad * 8.0 for name, grad in gradients(0).items() if grad is not None}
    assert not optimizer.unscale_(scaled, scaler)
    with pytest.raises(RuntimeError, match="already called"):
        optimizer.unscale_(scaled, scaler)
    scaler.step(optimizer, scaled)
    scaler.update()
    want = locally(sgd(lr=1.0), [gradients(0)])
    assert_same(params, want)
    scaled = gradients(1)
    scaled["scale"] = torch.tensor(float("inf"))
    assert optimizer.unscale_(scaled, scaler)
    scaler.step(optimizer, scaled)
    scaler.update()
    assert_same(params, want)
    assert scaler.get_scale() == 4.0
    assert {one.steps for one in optimizer.counters().values()} == {1}
    optimizer.close()


class Doubling(torch.optim.Optimizer):
    """A class that has no functional equivalent."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["steps"] = self.state[param].get("steps", 0) + 1
                    param.data.sub_(param.grad, alpha=2 * group["lr"])


def test_any_class_steps_with_one_warning_and_leaves_grad_alone() -> None:
    params = parameters()
    kept = torch.ones(())
    params["scale"].grad = kept
    with pytest.warns(UserWarning, match="Doubling.* has no functional equivalent") as seen:
        optimizer = over_threads(Doubling, params, placement(2), lr=0.25)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert not optimizer.is_functional_optim
    optimizer.step(gradients(0, ("hidden.bias",)))
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step(gradients(1))
    saved = optimizer.state_dict()
    assert [saved["state"][k]["steps"] for k in range(4)] == [2, 2, 1, 2]
    optimizer.close()
    want = parameters()
    for step, lr, without in ((0, 0.25, ("hidden.bias",)), (1, 0.5, ())):
        for name, grad in gradients(step, without).items():
            if grad is not None:
                want[name].data.sub_(grad, alpha=2 * lr)
    assert_same(params, want)
    assert params["scale"].grad is kept
    assert params["embed.weight"].grad is None


class Failing(Doubling):
    """Fails where it is made for the worker that has the embedding, or in each step."""

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
    at_ps0 = 4 * (15 + 4) + 4 * 4  # embedding and bias, then the bias alone
    at_ps1 = 2 * 4 * (16 + 1)
    assert {worker: one[:3] for worker, one in found.items()} == {
        "ps0": (2, 0, at_ps0),
        "ps1": (2, 0, at_ps1),
    }
    optimizer.close()


class Waiting(Doubling):
    """Steps when it is let go."""

    go = threading.Event()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.go.wait(60)


@pytest.mark.filterwarnings("ignore:.*no functional equivalent")
def test_steps_that_wait_are_counted() -> None:
    optimizer = over_threads(Waiting, parameters(), placement(2))
    sources = optimizer._sources(gradients(0))
    taken = dict.fromkeys(optimizer.workers, Taken())
    groups = optimizer.param_groups
    sent = [optimizer._workers.send_step(sources, groups, taken) for _ in range(3)]
    Waiting.go.set()
    for asked in sent:
        for future in asked.futures.values():
            future.result(60)
    assert [(one.steps, one.waits) for one in optimizer.counters().values()] == [(3, 2)] * 2
    optimizer.close()


def test_without_rpc_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed.rpc, "is_available", lambda: False)
    with pytest.raises(ImportError, match="over_threads does without it"):
        DistributedOptimizer(sgd, [], lr=0.1)


def test_a_class_given_with_positional_arguments() -> None:
    params = parameters()
    optimizer = over_threads(torch.optim.SGD, params, placement(2), 0.1, 0.9)
    assert optimizer.param_groups[0]["momentum"] == 0.9
    optimizer.step(gradients(0))
    optimizer.close()
    assert_same(params, locally(sgd(0.1, 0.9), [gradients(0)]))
