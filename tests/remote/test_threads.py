"""DistributedOptimizer over threads, which equals one process for any placement."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import sharding
from functional_optim import (
    DistributedOptimizer,
    adamw,
    sgd,
)
from tests.cases import ONE_CHAIN
from tests.choices import case, examples, pairs

from .support import SHAPES, assert_same, gradients, locally, parameters, placement

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
    # Centered RMSprop with alpha 0 takes roots of numbers that rounding made negative, as in torch.
    assume(all(bool(one.isfinite().all()) for one in want.values()))
    params = parameters()
    optimizer = over_threads(ONE_CHAIN[name].factory, params, placement(workers), **options)
    for one in steps:
        optimizer.step(one)
    optimizer.close()
    assert_same(params, want)
    assert all(param.grad is None for param in params.values())


def test_a_plan_places_parameters() -> None:
    params = parameters()
    plan = sharding.plan(params, 2, "greedy")
    optimizer = over_threads(adamw, params, plan, lr=0.1)
    assert sorted(optimizer.workers) == ["rank0", "rank1"]
    optimizer.step(gradients(0))
    optimizer.close()
    assert_same(params, locally(adamw(lr=0.1), [gradients(0)]))


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
