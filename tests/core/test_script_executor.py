"""The script executor is the reference executor, bit for bit, with everything that can be given."""

import linecache
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import adam, chain, clip_by_global_norm, sgd

from .support import CHAINS, VARIANTS, assert_differ, assert_same, noise, tree

EVERY = {**VARIANTS, **CHAINS}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EVERY)
def test_scripted_equals_reference(name: str, dtype: torch.dtype) -> None:
    reference = EVERY[name]
    scripted = reference.using(executor="script")
    params, state = tree(0, dtype), reference.init(tree(0, dtype))
    other, other_state = tree(0, dtype), scripted.init(tree(0, dtype))
    for step in range(4):
        grads: dict[str, Any] = tree(step + 1, dtype)
        grads["b"] = None if step == 1 else grads["b"]
        params, state = reference.update(params, grads, state)
        other, other_state = scripted.update(other, grads, other_state)
        assert_same(other, params)
        assert_same(other_state, state)
    assert_differ(params, tree(0, dtype))


@pytest.mark.parametrize("name", EVERY)
def test_states_are_our_own_classes_again(name: str) -> None:
    """TorchScript returns a new NamedTuple class at every call; ours must come back."""
    scripted = EVERY[name].using(executor="script")
    param = noise(0, 3)
    state = scripted.init(param)
    _, new = scripted.update(param, noise(1, 3), state)
    kinds = [type(stage) for stage in state.leaves.stages]
    assert [type(stage) for stage in new.leaves.stages] == kinds


@pytest.mark.parametrize("name", EVERY)
def test_values_that_are_not_finite_and_signed_zeros(name: str) -> None:
    optimizer = EVERY[name]
    values = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 3e38, -1.0])
    grid = torch.cartesian_prod(values, values)
    param, grad = grid[:, 0].clone(), grid[:, 1].clone()
    outcomes = []
    for executor in ("reference", "script"):
        one = optimizer.using(executor=executor)
        new, state = one.update(param, grad, one.init(param))
        new, state = one.update(new, grad.flip(0), state)
        outcomes.append((new, state))
    assert_same(*outcomes)


@pytest.mark.parametrize("name", EVERY)
def test_parameters_that_require_grad(name: str) -> None:
    """Through autograd's own version of the program, also after it has been specialised."""
    reference, scripted = EVERY[name], EVERY[name].using(executor="script")
    param, state = noise(0, 3, dtype=torch.float32), reference.init(torch.zeros(3))
    for step in range(4):
        grad = noise(step + 1, 3, dtype=torch.float32)
        leaves = [param.detach().clone().requires_grad_() for _ in range(2)]
        new, new_state = reference.update(leaves[0], grad, state)
        other, other_state = scripted.update(leaves[1], grad, state)
        assert_same(other, new)
        assert_same(other_state, new_state)
        slopes = [
            torch.autograd.grad(one.sum(), leaf)[0]
            for one, leaf in zip((new, other), leaves, strict=True)
        ]
        torch.testing.assert_close(slopes[1], slopes[0], rtol=1e-6, atol=1e-7)
        param = new.detach()
        state = reference.update(param, grad, state)[1]


def test_overrides_and_schedules_reach_scripted_leaves() -> None:
    reference = (
        chain(clip_by_global_norm(1.0), adam(lambda made: 0.1 / (1 + made)))
        .override(("w",), lr=0.3, betas=(0.5, 0.6))
        .override(("b",), amsgrad=True)
        .override(("s",), max_norm=0.1, maximize=True)
    )
    scripted = reference.using(executor="script")
    params, state = tree(0), reference.init(tree(0))
    other, other_state = tree(0), scripted.init(tree(0))
    for step in range(3):
        params, state = reference.update(params, tree(step + 1), state)
        other, other_state = scripted.update(other, tree(step + 1), other_state)
    assert_same((other, other_state), (params, state))
    assert [len(leaf.stages[-1].max_exp_avg_sq) for leaf in state.leaves.values()] == [0, 1, 0, 0]


def test_hyper_parameters_of_one_step() -> None:
    scripted, param = adam(0.1).using(executor="script"), noise(0, 3)
    state = scripted.init(param)
    for rate in (0.1, 0.2):
        assert_same(
            scripted.update(param, noise(1, 3), state, lr=rate),
            adam(rate).update(param, noise(1, 3), state),
        )


@pytest.mark.parametrize("method", ["update", "update_"])
@pytest.mark.parametrize("where", [(), ("b",)])
def test_a_differentiated_hyper_parameter_is_refused_and_nothing_changes(
    method: str, where: tuple[str, ...]
) -> None:
    params = {"a": noise(0, 3), "b": noise(1, 3)}
    optimizer = (
        adam(0.1).override(where, lr=torch.tensor(0.1, requires_grad=True)).using(executor="script")
    )
    state = optimizer.init(params)
    before = {key: value.clone() for key, value in params.items()}
    with pytest.raises(TypeError, match=r"adam .* tensor.* numbers.* executor='reference'"):
        getattr(optimizer, method)(params, params, state)
    assert_same(params, before)
    assert [int(leaf.step) for leaf in state.leaves.values()] == [0, 0]


def test_no_leaf_has_a_gradient() -> None:
    optimizer = adam(0.1).using(executor="script")
    params: dict[str, Tensor] = {"a": noise(0, 3)}
    state = optimizer.init(params)
    new, new_state = optimizer.update(params, {"a": None}, state)
    optimizer.update_(params, {"a": None}, state)
    assert_same((new, new_state), (params, state))


def test_one_program_serves_many_trees() -> None:
    """Specialised for what it saw last, it must still be right for other shapes and dtypes."""
    for rate in (0.1, 0.2):
        for shape in ((), (2,), (3, 0), (2, 3, 4)):
            for dtype in (torch.float32, torch.float64):
                params = [noise(i, *shape, dtype=dtype) for i in range(3)]
                grads = [noise(i + 5, *shape, dtype=dtype) for i in range(3)]
                state = sgd(rate, momentum=0.9).init(params)
                wanted = sgd(rate, momentum=0.9).update(params, grads, state)
                scripted = sgd(rate, momentum=0.9).using(executor="script")
                assert_same(scripted.update(params, grads, state), wanted)


def test_programs_survive_a_cleared_line_cache() -> None:
    """Debuggers and test tools clear it; the source of a program must not go with it."""
    kept = dict(linecache.cache)
    sgd(0.1).script([torch.ones(2)])
    try:
        linecache.clearcache()
        params = [torch.ones(2)]
        sgd(0.5).script(params).step([torch.ones(2)])
    finally:
        linecache.cache.update(kept)
    assert_same(params[0], torch.full((2,), 0.5))
