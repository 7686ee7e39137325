"""TorchOptimizer is torch.optim.X(foreach=False), bit for bit: parameters and state."""

from typing import Any

import pytest
import torch

from functional_optim import (
    TorchOptimizer,
    adam,
    adamw,
    as_functional_optim,
    chain,
    clip_by_global_norm,
    qhm,
    sgd,
)

from .support import (
    CASES,
    Case,
    Twins,
    assert_same_tensors,
    noise,
    parameters,
    params_of,
    same_bits,
    set_grads,
    twins,
)
from .test_from_torch_groups import OTHER

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def test_it_is_a_torch_optimizer() -> None:
    optimizer = TorchOptimizer(parameters(1), adam(0.1))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.optimizer.links == adam(0.1).links
    assert optimizer.defaults == dict(adam(0.1).hyper)
    assert optimizer.step() is None
    assert "lr: 0.1" in repr(optimizer)


@every_case
@pytest.mark.parametrize("executor", ["reference", "script"])
def test_several_steps(case: Case, executor: str) -> None:
    pair = twins(case, executor=executor)
    for seed in range(4):
        pair.step(seed)
        pair.assert_same()


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(case: Case, dtype: torch.dtype) -> None:
    pair = twins(case, dtype)
    for seed in range(3):
        pair.step(seed)
        pair.assert_same()


@every_case
@pytest.mark.parametrize("executor", ["reference", "script"])
def test_missing_gradients(case: Case, executor: str) -> None:
    pair = twins(case, executor=executor)
    for seed, without in enumerate([{1}, {1, 2}, {0, 1, 2, 3}, {0}, set()]):
        pair.step(seed, without)
        pair.assert_same()


def test_a_parameter_without_gradient_is_left_alone_with_its_state(flat: bool) -> None:
    optimizer = TorchOptimizer(parameters(1), adam(0.1))
    set_grads(params_of(optimizer), 0, without={1})
    versions = [param._version for param in params_of(optimizer)]
    optimizer.step()
    changed = [p._version != v for p, v in zip(params_of(optimizer), versions, strict=True)]
    assert changed == [True, flat, True, True]  # of a flat buffer, autograd is told as a whole
    assert [int(optimizer.state[p]["step"]) for p in params_of(optimizer)] == [1, 0, 1, 1]


@every_case
@pytest.mark.parametrize("named", [False, True])
def test_groups_with_options_of_their_own(case: Case, named: bool) -> None:
    other = OTHER[case[0].__name__]

    def groups(params: list[Any]) -> Any:
        given = [(f"p{i}", param) for i, param in enumerate(params)] if named else params
        return [{"params": given[:1]}, {"params": given[1:3], **other}, {"params": given[3:]}]

    pair = twins(case, groups=groups)
    for seed in range(4):
        pair.step(seed, without={seed})
        pair.assert_same()


@every_case
def test_strides(case: Case) -> None:
    def strided(params: list[Any]) -> list[torch.nn.Parameter]:
        image = noise(3, 2, 3, 4, 5)
        return [
            torch.nn.Parameter(image.to(memory_format=torch.channels_last)),
            torch.nn.Parameter(image[0, 0].t()),
            torch.nn.Parameter(noise(4, 6, 8)[::2, 1::3]),
        ]

    pair = twins(case, groups=strided)
    for seed in range(3):
        pair.step(seed)
        pair.assert_same()
    strides = [(a.stride(), b.stride()) for a, b in pair.pairs]
    assert all(a == b for a, b in strides)


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "Adagrad", "Rprop"])
def test_one_parameter_twice_in_a_group_is_stepped_once(name: str) -> None:
    """torch warns, and steps it twice; here it warns too, and a step is one step."""
    cls, options = CASES[name]
    twice, once = parameters(3), parameters(3)
    with pytest.warns(UserWarning, match="duplicate"):
        doubled = TorchOptimizer(
            [twice[0], twice[1], twice[0]], as_functional_optim(cls, **options)
        )
    plain = TorchOptimizer(once[:2], as_functional_optim(cls, **options))
    for seed in range(3):
        set_grads(twice[:2], seed)
        set_grads(once[:2], seed)
        doubled.step()
        plain.step()
    assert torch.equal(twice[0], once[0])
    assert torch.equal(twice[1], once[1])
    assert int(doubled.state[twice[0]]["step"]) == 3


def test_frozen_parameters_join_when_they_are_thawed() -> None:
    pair = twins(CASES["Adam"])
    pair.each(lambda one: params_of(one)[1].requires_grad_(requires_grad=False))
    pair.step(0, without={1})
    pair.each(lambda one: params_of(one)[1].requires_grad_())
    pair.step(1)
    pair.assert_same()


def test_a_chain_clips_over_all_groups_at_once() -> None:
    pair = clipped_twins()
    for seed in range(3):
        set_grads(params_of(pair.ours), seed, without={2})
        set_grads(params_of(pair.theirs), seed, without={2})
        grads = [p.grad for p in params_of(pair.theirs) if p.grad is not None]
        norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()
        assert norm > 1.0
        for grad in grads:
            grad.mul_((1.0 / (norm + 1e-6)).to(grad.dtype))
        pair.each(lambda optimizer: optimizer.step())
        torch.testing.assert_close(
            params_of(pair.ours), params_of(pair.theirs), rtol=1e-6, atol=1e-7
        )
    untouched = [p.grad for p in params_of(pair.ours) if p.grad is not None]
    assert max(float(grad.norm()) for grad in untouched) > 1.0


def clipped_twins() -> Twins:
    def groups(params: list[Any]) -> Any:
        return [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.5}]

    return Twins(
        torch.optim.SGD(groups(parameters(1)), lr=0.1, momentum=0.9, foreach=False),
        TorchOptimizer(
            groups(parameters(1)), chain(clip_by_global_norm(1.0), sgd(0.1, momentum=0.9))
        ),
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        chain(clip_by_global_norm(1.0), adamw(0.1, weight_decay=0.2)),
        chain(clip_by_global_norm(0.5), qhm(0.1, 0.9)),
        sgd(0.1, momentum=0.9),
    ],
)
def test_any_chain_is_what_update_gives(optimizer: Any) -> None:
    for executor in ("reference", "script"):
        ours = TorchOptimizer(parameters(1), optimizer.using(executor=executor))
        params = {str(i): p.detach() for i, p in enumerate(parameters(1))}
        state = optimizer.init(params)
        for seed in range(3):
            set_grads(params_of(ours), seed, without={seed})
            grads = {str(i): p.grad for i, p in enumerate(params_of(ours))}
            params, state = optimizer.update(params, grads, state)
            ours.step()
            assert_same_tensors(params_of(ours), list(params.values()))


def test_gradients_are_not_changed() -> None:
    ours = TorchOptimizer(
        parameters(1),
        chain(clip_by_global_norm(0.1), as_functional_optim(torch.optim.SGD, 0.1, maximize=True)),
    )
    set_grads(params_of(ours), 0)
    before = [p.grad.clone() for p in params_of(ours) if p.grad is not None]
    ours.step()
    after = [p.grad for p in params_of(ours) if p.grad is not None]
    assert all(same_bits(a, b) for a, b in zip(after, before, strict=True))
