"""Replicas of a model in one process: their inner steps, their means, and rejected arguments."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.claims.replicas import (
    ReplicatedAverager,
    ReplicatedModel,
    ReplicatedOptimizer,
    at_once,
    mean_of_slices,
    one_by_one,
)
from functional_optim import TorchOptimizer, adamw, sgd
from sharding.transport.local import LocalWorld
from tests.averaging_alone.replicas import AVERAGERS, INNER, STEPS, same
from tests.averaging_alone.training import backward, batch, model, values
from tests.choices import case


def loss(module: Any, inputs: Tensor) -> Tensor:
    return module(inputs).square().mean()


def batches(size: int, step: int) -> Tensor:
    return torch.stack([batch(rank, step) for rank in range(size)])


def test_a_replicated_model_trains_as_ranks_do() -> None:
    """A replicated model trains like ranks.

    With ``one_by_one`` all bits are equal; with ``at_once`` the values are equal within rounding.
    """

    def run(group: Any) -> list[list[Tensor]]:
        module = model()
        inner = TorchOptimizer(module.parameters(), INNER["AdamW"])
        averager = AVERAGERS["DiLoCo"](list(module.parameters()), group)
        seen = []
        for step in range(STEPS):
            backward(module, 0 if step == 0 else group.rank(), step)
            inner.step()
            averager.average_parameters(module.parameters())
            seen.append(values(module))
        return seen

    for size in (2, 3):
        want = LocalWorld(size).run(run)
        for over in (one_by_one, at_once):
            made = ReplicatedModel(model(), size, over=over)
            inner = ReplicatedOptimizer(made.params, INNER["AdamW"], over=over)
            averager = ReplicatedAverager(made, AVERAGERS["DiLoCo"])
            for step in range(STEPS):
                own = batches(size, step)
                losses, grads = made.gradients(loss, own[:1].expand_as(own) if step == 0 else own)
                inner.step(grads)
                averager.average_parameters()
                assert losses.shape == (size,)
                for rank in range(size):
                    found = values(made.replica(rank))
                    with case(size=size, over=over, step=step, rank=rank):
                        if over is one_by_one:
                            assert same(found, want[rank][step])
                        else:
                            torch.testing.assert_close(
                                found, want[rank][step], rtol=1e-4, atol=1e-5
                            )


def test_each_replica_has_buffers_of_its_own() -> None:
    for over in (one_by_one, at_once):
        module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        made = ReplicatedModel(module, 2, over=over)
        given = batches(2, 0)
        for rank in range(2):
            alone = made.replica(rank)
            loss(alone, given[rank])
            with case(over=over, rank=rank):
                assert torch.equal(made.buffers["1.num_batches_tracked"], torch.zeros(2).long())
                held = ReplicatedModel(module, 2, over=over)
                held.gradients(loss, given)
                for name, buffer in alone.named_buffers():
                    torch.testing.assert_close(held.buffers[name][rank], buffer)
                assert not torch.equal(*held.buffers["1.running_mean"])
        assert torch.equal(module[1].running_mean, torch.zeros(2))


def test_parameters_that_are_tied_are_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 3)
            self.second.weight = self.first.weight

        def forward(self, inputs: Tensor) -> Tensor:
            return self.second(self.first(inputs))

    made = ReplicatedModel(Tied(), 2)
    assert "second.weight" not in made.params
    _, grads = made.gradients(loss, batches(2, 0))
    for rank in range(2):
        alone = made.replica(rank)
        assert alone.first.weight is alone.second.weight
        loss(alone, batch(rank, 0)).backward()
        torch.testing.assert_close(grads["first.weight"][rank], alone.first.weight.grad)


def test_what_has_no_gradient_is_left_alone() -> None:
    for over in (at_once, one_by_one):
        params = {"a": torch.ones(2, 3), "b": torch.ones(2)}
        inner = ReplicatedOptimizer(params, adamw(lr=0.1, weight_decay=0.1), over=over)
        before = inner.state.leaves["b"]
        inner.step({"a": torch.ones(2, 3), "b": None}, lr=0.5)
        inner.step({})
        with case(over=over):
            assert torch.equal(params["b"], torch.ones(2)) and inner.state.leaves["b"] is before
            assert int(inner.state.leaves["a"].step) == 1 and (params["a"] < 0.6).all()


def test_a_rule_sees_one_replica_at_a_time() -> None:
    """A rule that uses whole tensors gets one replica at a time, with ``at_once`` as well.

    Norms may round differently, so the comparison has a tolerance.
    """
    made = [ReplicatedModel(model(), 3) for _ in range(2)]
    rule = INNER["of whole tensors"]
    inner = [
        ReplicatedOptimizer(one.params, rule, over=over)
        for one, over in zip(made, (at_once, one_by_one), strict=True)
    ]
    for step in range(STEPS):
        _, grads = made[1].gradients(loss, batches(3, step))
        for one in inner:
            one.step(grads)
        for name, param in made[0].params.items():
            torch.testing.assert_close(param, made[1].params[name], rtol=1e-6, atol=1e-6)


def test_the_mean_of_slices_is_in_rank_order() -> None:
    given = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(1))
    want = (((given[0] + given[1]) + given[2]) + given[3]) / 4
    before = given.clone()
    assert torch.equal(mean_of_slices(given), want) and torch.equal(given, before)


def test_what_cannot_be_stepped_is_refused() -> None:
    unlike = torch.tensor([[1.0], [1.0], [2.0]])
    trained = ReplicatedModel(model(), 2)
    inner = ReplicatedOptimizer(trained.params, sgd(lr=0.1))
    for call, kind, message in [
        (lambda: ReplicatedModel(model(), 0), ValueError, "count must be .* got 0"),
        (lambda: trained.gradients(loss, batch(0, 0)), ValueError, r"tensor 0 has shape \(5, 3\)"),
        (lambda: inner.step({"weights": unlike}), ValueError, r"\['weights'\], which are no"),
        (lambda: ReplicatedOptimizer({}, sgd()), ValueError, "nothing to step"),
        (lambda: ReplicatedOptimizer({"a": unlike}, 3), TypeError, "must be an Optimizer"),
    ]:
        with case(message=message), pytest.raises(kind, match=message):
            call()
