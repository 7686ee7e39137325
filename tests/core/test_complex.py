"""Complex parameters give what their real view gives, bit for bit, in params and state."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, adam, sgd

from .support import CHAINS, VARIANTS, assert_same, like, noise, tensors

EVERY = {**VARIANTS, **CHAINS}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "sliced": lambda t: t[::2, 1:],
}


def _complex(seed: int, dtype: torch.dtype = torch.complex64) -> Tensor:
    return noise(seed, 4, 3, dtype=dtype)


def _views(value: Any) -> list[Tensor]:
    """All tensors of a state, the complex ones as their real view."""
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors(value)]


@pytest.mark.parametrize("executor", ["reference", "script"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("name", EVERY)
def test_a_complex_leaf_is_its_real_view(
    name: str, dtype: torch.dtype, layout: str, executor: Any
) -> None:
    optimizer = EVERY[name].using(executor=executor)
    param = LAYOUTS[layout](_complex(0, dtype))
    written = like(param, param)
    real = torch.view_as_real(param.clone(memory_format=torch.preserve_format))
    state, real_state = optimizer.init(param), optimizer.init(real)
    written_state = optimizer.init(written)
    for step in range(3):
        grad = like(param, LAYOUTS[layout](_complex(step + 1, dtype)))
        param, state = optimizer.update(param, grad, state)
        optimizer.update_(written, grad, written_state)
        real, real_state = optimizer.update(real, torch.view_as_real(grad), real_state)
        assert param.dtype == dtype
        assert_same(torch.view_as_real(param), real)
        assert_same(_views(state), _views(real_state))
        assert_same(written, param)
        assert_same(written_state, state)


@pytest.mark.parametrize("name", VARIANTS)
def test_state_tensors_are_complex_like_their_parameter(name: str) -> None:
    param = _complex(0)
    for state in VARIANTS[name].init(param).leaves.stages:
        for tensor in tensors(state):
            assert tensor.dtype == param.dtype
            assert tensor.shape == param.shape


def test_complex_and_real_leaves_stand_in_one_tree() -> None:
    params = {"z": _complex(0), "x": noise(1, 5), "s": noise(2, dtype=torch.complex128)}
    grads = {"z": _complex(3), "x": noise(4, 5), "s": noise(5, dtype=torch.complex128)}
    new, _ = adam(0.1).update(params, grads, adam().init(params))
    for key, param in params.items():
        alone, _ = adam(0.1).update(param, grads[key], adam().init(param))
        assert_same(new[key], alone)


@pytest.mark.parametrize("executor", ["reference", "script"])
def test_a_conjugate_gradient_is_its_values(executor: Any) -> None:
    optimizer = adam(0.1).using(executor=executor)
    param, grad = _complex(0), _complex(1).conj()
    assert grad.is_conj()
    state = optimizer.init(param)
    assert_same(
        optimizer.update(param, grad, state), optimizer.update(param, grad.resolve_conj(), state)
    )


def test_update_of_a_conjugate_parameter() -> None:
    param, grad = _complex(0).conj(), _complex(1)
    new, _ = sgd(0.5).update(param, grad, sgd().init(param))
    wanted, _ = sgd(0.5).update(param.resolve_conj(), grad, sgd().init(param))
    assert_same(new, wanted)


@pytest.mark.parametrize("optimizer", [adam(0.1), sgd(0.1, momentum=0.9)], ids=["adam", "sgd"])
def test_expanded_and_empty_complex_leaves(optimizer: Optimizer) -> None:
    expanded = torch.tensor(1.0 + 2.0j).expand(2, 3)
    grad = noise(0, 2, 3, dtype=torch.complex64)
    new, state = optimizer.update(expanded, grad, optimizer.init(expanded))
    wanted, other = optimizer.update(expanded.clone(), grad, optimizer.init(expanded.clone()))
    assert_same((new, state), (wanted, other))
    empty = torch.zeros(0, 3, dtype=torch.complex64)
    assert optimizer.update(empty, empty, optimizer.init(empty))[0].shape == (0, 3)


def test_derivatives_go_through_a_complex_step() -> None:
    optimizer = adam(0.1)
    start = noise(0, 3, dtype=torch.complex128)

    def step(param: Tensor, grad: Tensor) -> Tensor:
        return optimizer.update(param, grad, optimizer.init(start))[0]

    param, grad = start.clone().requires_grad_(), noise(1, 3, dtype=torch.complex128)
    assert torch.autograd.gradcheck(step, (param, grad.requires_grad_()))


def test_vmap_over_complex_leaves() -> None:
    optimizer = adam(0.1)
    params, grads = (noise(seed, 4, 3, dtype=torch.complex128) for seed in (0, 1))

    def step(param: Tensor, grad: Tensor) -> Tensor:
        return optimizer.update(param, grad, optimizer.init(param))[0]

    batched = torch.vmap(step)(params, grads)
    torch.testing.assert_close(batched, step(params, grads), rtol=1e-13, atol=1e-14)
