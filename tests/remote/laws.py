"""Laws of DistributedOptimizer over every transport: bit for bit the same numbers.

Each law takes a function that makes an optimizer, as ``DistributedOptimizer.over_threads`` does.
The workers are "ps0" and "ps1", or the equivalents of the transport. The laws read parameters by
snapshots.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from functional_optim import adamw, chain, clip_by_global_norm, ftrl, rowwise_adagrad, sgd
from functional_optim.remote import StaleError
from tests.cases import ONE_CHAIN
from tests.choices import case, one_in

from . import composed_laws
from .law_support import Make, values
from .support import SHAPES, assert_same, gradients, locally, noise, parameters, placement

__all__ = ["LAWS", "Make", "values"]


def every_optimizer_equals_the_local_run(make: Make) -> None:
    """Every sixth optimizer is tried; ``test_threads.py`` tries all with drawn options."""
    steps = [gradients(0), gradients(1, ("scale",))]
    for name, one in one_in(6, ONE_CHAIN.items()):
        with case(name=name):
            optimizer = make(one.factory, parameters(), placement(2))
            for given in steps:
                optimizer.step(given)
            assert_same(values(optimizer), locally(one.factory(), steps))
            optimizer.close()


def groups_schedulers_and_state(make: Make) -> None:
    """The state moves to torch.optim, to other workers, and back."""

    def grouped(own: Mapping[str, Any]) -> list[dict[str, Any]]:
        pairs = list(own.items())
        return [{"params": pairs[:1]}, {"params": pairs[1:], "weight_decay": 0.5}]

    twins = parameters()
    twin = torch.optim.AdamW(grouped(twins), lr=0.1, foreach=False)
    optimizer = make(torch.optim.AdamW, grouped(parameters()), placement(2), lr=0.1)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, twin)]
    for step in range(4):
        given = gradients(step, ("scale",) if step == 1 else ())
        for name, grad in given.items():
            twins[name].grad = grad
        optimizer.step(list(given.values()))
        twin.step()
        for scheduler in schedulers:
            scheduler.step()
        if step == 1:
            saved, found = optimizer.state_dict(), values(optimizer)
            assert sorted(map(sorted, saved["workers"].values())) == [
                ["embed.weight", "hidden.bias"],
                ["hidden.weight", "scale"],
            ]
            names = [group["param_names"] for group in saved["param_groups"]]
            assert names == [list(SHAPES)[:1], list(SHAPES)[1:]]
            twin.load_state_dict(saved)
            optimizer.close()
            moved = {name: one.requires_grad_() for name, one in found.items()}
            optimizer = make(torch.optim.AdamW, grouped(moved), placement(2, 1), lr=9.0)
            optimizer.load_state_dict(twin.state_dict())
            schedulers[0].optimizer = optimizer
    assert_same(values(optimizer), twins)
    wrong = optimizer.state_dict()
    wrong["param_groups"][0]["lr"] = 9.0
    wrong["state"][0]["exp_avg"].zero_()
    wrong["state"][1]["exp_avg"] = torch.zeros(7)
    with pytest.raises(ValueError, match=r"load_state_dict failed on 1 of 2 workers:\n"):
        optimizer.load_state_dict(wrong)
    optimizer.step(gradients(4))
    for name, grad in gradients(4).items():
        twins[name].grad = grad
    twin.step()
    assert_same(values(optimizer), twins)
    optimizer.close()


def snapshots_are_versions_and_too_old_ones_refused(make: Make) -> None:
    """A snapshot keeps the values of its step; counters record the age of gradients."""
    optimizer = make(sgd, parameters(), placement(2), lr=0.1)
    optimizer.limit_staleness(1)
    held = [optimizer.snapshot() for _ in range(3)]
    made = [gradients(0), gradients(1)]
    optimizer.step(made[0], held[0])
    optimizer.step(made[1], held[1])
    with pytest.raises(StaleError, match="step failed on 2 of 2 workers") as caught:
        optimizer.step(gradients(2), held[2])
    assert "these gradients are 2 steps old" in str(caught.value)
    fresh, old = optimizer.snapshot(), [optimizer.snapshot()]
    optimizer.step(gradients(2), fresh)
    made.append(gradients(2))
    assert_same(old[0].parameters, locally(sgd(lr=0.1), made[:2]))
    leaves = list(old[0].parameters.values())
    grads = torch.autograd.grad(sum((one * one).sum() for one in leaves), leaves)
    assert all(torch.equal(grad, 2 * leaf) for grad, leaf in zip(grads, leaves, strict=True))
    assert_same(values(optimizer), locally(sgd(lr=0.1), made))
    sizes = [4 * (15 + 4), 4 * (16 + 1)]
    for size, one in zip(sizes, optimizer.counters().values(), strict=True):
        assert (one.steps, one.refused, one.reads) == (3, 1, 6)
        assert (one.gradient_bytes, one.read_bytes) == (3 * size, 6 * size)
        assert one.staleness == {0: 2, 1: 1}
    optimizer.close()


def clipping_and_a_scaler_are_over_all_workers(make: Make) -> None:
    """The test clips by a call and in the chain, and GradScaler skips one step."""
    made = chain(clip_by_global_norm(0.1), adamw(lr=0.1))
    optimizer = make(made, parameters(), placement(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaled = {name: grad * 8.0 for name, grad in gradients(0).items() if grad is not None}
    assert not optimizer.unscale_(scaled, scaler)
    with pytest.raises(RuntimeError, match="already called"):
        optimizer.unscale_(scaled, scaler)
    twins = parameters()
    for name, grad in gradients(0).items():
        twins[name].grad = grad
    norm = optimizer.clip_grad_norm_(scaled, 1e9)
    torch.testing.assert_close(norm.float(), torch.nn.utils.clip_grad_norm_(twins.values(), 1e9))
    scaler.step(optimizer, scaled)
    scaler.update()
    want = locally(made, [gradients(0)])
    assert_same(values(optimizer), want)
    overflown = {**gradients(1), "scale": torch.tensor(float("inf"))}
    assert optimizer.unscale_(overflown, scaler)
    scaler.step(optimizer, overflown)
    scaler.update()
    assert_same(values(optimizer), want)
    assert scaler.get_scale() == 4.0
    assert {one.steps for one in optimizer.counters().values()} == {1}
    optimizer.close()


def sparse_gradients_touch_their_rows(make: Make) -> None:
    """Sparse gradients of an embedding bag change only their rows of the stored table."""
    for factory in (rowwise_adagrad, ftrl):
        with case(factory=factory):
            bag = nn.EmbeddingBag(6, 3, mode="sum", sparse=True)
            with torch.no_grad():
                bag.weight.copy_(noise(0, 6, 3))
            table = bag.weight.detach().clone()
            optimizer = make(factory, list(bag.named_parameters()), {"weight": "ps1"}, lr=0.5)
            own = factory(lr=0.5)
            state = own.init([table])
            for rows in ([1, 1, 4], [4, 0]):
                snapshot = optimizer.snapshot()
                found = snapshot.run(bag, torch.tensor([rows]))
                grads = torch.autograd.grad(
                    found.square().sum(), list(snapshot.parameters.values())
                )
                assert grads[0].is_sparse
                norm = optimizer.clip_grad_norm_(grads, 1e9)
                torch.testing.assert_close(norm, grads[0].to_dense().double().norm())
                optimizer.step(grads, snapshot)
                own.update_([table], [grads[0]], state)
            assert_same(values(optimizer), {"weight": table})
            assert_same({"": table[[2, 3, 5]]}, {"": noise(0, 6, 3)[[2, 3, 5]]})
            assert next(iter(optimizer.counters().values())).gradient_bytes == 4 * 3 * 5
            optimizer.close()


def what_does_not_fit_reaches_no_worker(make: Make) -> None:
    """A wrong gradient or option of one worker is refused before any worker steps."""
    pairs = list(parameters().items())
    groups = [{"params": pairs[:1]}, {"params": pairs[1:]}]
    where = dict.fromkeys(parameters(), "ps1") | {"embed.weight": "ps0"}
    optimizer = make(adamw, groups, where, lr=0.1)
    odd: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "'scale' has shape .2,., but", {"scale": noise(0, 2)}),
        (ValueError, "'scale' has dtype", {"scale": noise(0).double()}),
        (TypeError, "must be a tensor or None, got float", {"scale": 1.0}),
        (ValueError, "got 3 gradients for 4 parameters; give one", [None] * 3),
    ]
    for kind, text, given in odd:
        with case(text=text), pytest.raises(kind, match=text):
            optimizer.step({**gradients(0), **given} if isinstance(given, dict) else given)
    optimizer.param_groups[1]["lr"] = -1.0
    with pytest.raises(ValueError, match="step failed on 1 of 2 workers:\n  .*: .*lr must be"):
        optimizer.step(gradients(0))
    optimizer.param_groups[1]["lr"] = 0.1
    assert_same(values(optimizer), parameters())
    assert [one.steps for one in optimizer.counters().values()] == [0, 0]
    optimizer.step(gradients(0))
    assert_same(values(optimizer), locally(adamw(lr=0.1), [gradients(0)]))
    optimizer.close()


class Writing(torch.optim.Optimizer):
    """Optimizer class without functional equivalent that writes to its gradients."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        self.state[param]["sum"] = self.state[param].get("sum", 0) + param.grad
                        param.sub_(param.grad.mul_(2), alpha=group["lr"])


def any_class_steps(make: Make) -> None:
    """The options and the state of a class without functional equivalent can change and load."""
    with pytest.warns(UserWarning, match="Writing.* has no functional equivalent"):
        optimizer = make(Writing, parameters(), placement(2), lr=0.25)
    optimizer.step(gradients(0))
    optimizer.param_groups[0]["lr"] = 0.5
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    optimizer.step(gradients(1, ("scale",)))
    sums = [one["sum"] for one in optimizer.state_dict()["state"].values()]
    want = parameters()
    for number, name in enumerate(SHAPES):
        assert torch.equal(saved["state"][number]["sum"], gradients(0)[name])
        given = gradients(0)[name], gradients(1)[name]
        total = given[0] if name == "scale" else given[0] + given[1]
        assert torch.equal(sums[number], total)
        want[name].data.sub_(2 * given[0], alpha=0.25)
        if name != "scale":
            want[name].data.sub_(2 * given[1], alpha=0.5)
    assert_same(values(optimizer), want)
    optimizer.close()


LAWS: Mapping[str, Callable[[Make], None]] = {
    one.__name__: one
    for one in (
        every_optimizer_equals_the_local_run,
        groups_schedulers_and_state,
        snapshots_are_versions_and_too_old_ones_refused,
        clipping_and_a_scaler_are_over_all_workers,
        sparse_gradients_touch_their_rows,
        what_does_not_fit_reaches_no_worker,
        any_class_steps,
    )
} | composed_laws.LAWS
