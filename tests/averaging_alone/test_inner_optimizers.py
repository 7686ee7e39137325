"""Composed inner optimizers, on ranks that are threads."""

import pytest
import torch

from benchmarks.claims.muloco import muloco_inner
from benchmarks.claims.replicas import ReplicatedModel, ReplicatedOptimizer, one_by_one
from functional_optim import adamw, matching, muon
from sharding.transport.local import LocalWorld
from tests.choices import case

from .inner_optimizers import PERIOD, Run
from .training import WIDTH, batch, model


def test_ranks_agree_after_each_period_and_only_then() -> None:
    ranks = LocalWorld(3).run(lambda group: Run(group, "MuLoCo", {}).steps(range(2 * PERIOD)))
    for step, seen in enumerate(zip(*ranks, strict=True), start=1):
        same = all(torch.equal(a, b) for one in seen[1:] for a, b in zip(seen[0], one, strict=True))
        with case(step=step):
            assert same == (step % PERIOD == 0)


def test_muon_steps_hidden_matrices_and_adamw_all_else() -> None:
    """Each part steps as it does alone, with the published settings and stacked replicas."""
    stacked = ReplicatedModel(model(), 2, over=one_by_one)
    inner = muloco_inner(0.05, 0.1, not_hidden=matching("2.*"))
    replicas = ReplicatedOptimizer(stacked.params, inner, over=one_by_one)
    alone = muon(lr=0.05, weight_decay=0.1, momentum=0.9, nesterov=False)
    rest = adamw(lr=0.05, weight_decay=0.1, betas=(0.9, 0.99))
    owners = {"0.weight": alone, "0.bias": rest, "2.weight": rest, "2.bias": rest}
    params = [
        {name: one[k].detach().clone() for name, one in stacked.params.items()} for k in range(2)
    ]
    states = [{name: owners[name].init(one) for name, one in own.items()} for own in params]
    for step in range(3):
        inputs = torch.stack([batch(rank, step) for rank in range(2)])
        assert inputs.shape[-1] == WIDTH
        _, grads = stacked.gradients(lambda module, given: module(given).square().mean(), inputs)
        replicas.step(grads)
        for k in range(2):
            for name, owner in owners.items():
                params[k][name], states[k][name] = owner.update(
                    params[k][name], grads[name][k], states[k][name]
                )
                with case(step=step, replica=k, name=name):
                    assert torch.equal(params[k][name], stacked.params[name][k])


def test_what_is_no_inner_optimizer_is_refused() -> None:
    for arguments, options, kind, message in [
        ((-0.1,), {"not_hidden": ("2",)}, ValueError, "lr must be .* got -0.1"),
        ((0.1, -1.0), {"not_hidden": ("2",)}, ValueError, "weight_decay must be .* got -1.0"),
        ((0.1,), {"not_hidden": "2.*"}, TypeError, "a selector such as matching"),
        ((0.1,), {"not_hidden": ("2",), "adjust_lr_fn": "x"}, ValueError, "adjust_lr_fn must be"),
    ]:
        with case(message=message), pytest.raises(kind, match=message):
            muloco_inner(*arguments, **options)
