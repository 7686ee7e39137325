"""Complex parameters, which give the bits of their real views in params and state."""

from collections.abc import Callable

import torch
from torch import Tensor

from functional_optim import Optimizer, adam, sgd
from functional_optim.kernels import ExecutorName
from tests.choices import each_value

from .scenarios import as_real
from .support import EVERY, IN_PYTHON, REAL, assert_same, like, noise, step, steps, tensors

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "sliced": lambda t: t[::2, 1:],
}
Z, G = (noise(seed, 4, 3, dtype=torch.complex64) for seed in (0, 1))


@each_value(
    optimizer={name: one for name, one in EVERY.items() if name.split()[0] not in REAL},
    layout=LAYOUTS,
    dtype=[torch.complex64, torch.complex128],
    executor=IN_PYTHON,
)
def test_a_complex_leaf_is_its_real_view(
    optimizer: Optimizer,
    layout: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    executor: ExecutorName,
) -> None:
    optimizer = optimizer.using(executor=executor)
    param, *grads = (layout(noise(seed, 4, 3, dtype=dtype)) for seed in range(4))
    real = torch.view_as_real(like(param, param))
    got, state = steps(optimizer, param, lambda index: grads[index], 3)
    want = steps(optimizer, real, lambda index: torch.view_as_real(grads[index]), 3)
    assert got.dtype == param.dtype
    assert_same(as_real((got, state)), tensors(*want))
    for kept in tensors(state.leaves.stages):
        by_element = (kept.dtype, kept.shape) == (param.dtype, param.shape)
        by_part = kept.dtype == param.real.dtype and kept.shape != real.shape
        is_number = kept.dtype == torch.float32 and kept.dim() == 0  # in torch's default dtype
        assert by_element or by_part or is_number


def test_complex_and_real_leaves_stand_in_one_tree() -> None:
    def leaves(seed: int) -> dict[str, Tensor]:
        scalar = noise(seed + 2, dtype=torch.complex128)
        return {"z": noise(seed, 4, 3, dtype=torch.complex64), "x": noise(seed, 5), "s": scalar}

    params, grads = leaves(0), leaves(3)
    new = step(adam(0.1), params, grads)
    for key, param in params.items():
        assert_same(new[key], step(adam(0.1), param, grads[key]))


@each_value(executor=IN_PYTHON)
def test_a_conjugate_is_its_values(executor: ExecutorName) -> None:
    optimizer, values = sgd(0.5, momentum=0.9).using(executor=executor), G.conj().resolve_conj()
    assert_same(step(optimizer, Z, G.conj()), step(optimizer, Z, values))
    assert_same(step(optimizer, G.conj(), Z), step(optimizer, values, Z))


@each_value(optimizer=[adam(0.1), sgd(0.1, momentum=0.9)])
def test_expanded_and_empty_complex_leaves(optimizer: Optimizer) -> None:
    expanded = torch.tensor(1.0 + 2.0j).expand(4, 3)
    assert_same(step(optimizer, expanded, G), step(optimizer, expanded.clone(), G))
    empty = torch.zeros(0, 3, dtype=torch.complex64)
    assert step(optimizer, empty, empty).shape == (0, 3)


def test_torch_func_goes_through_a_complex_step() -> None:
    params, grads = (noise(seed, 4, 3, dtype=torch.complex128) for seed in (0, 1))
    batched = torch.vmap(lambda param, grad: step(adam(0.1), param, grad))(params, grads)
    torch.testing.assert_close(batched, step(adam(0.1), params, grads), rtol=1e-13, atol=1e-14)
    state = adam().init(params[0])
    assert torch.autograd.gradcheck(
        lambda param, grad: adam(0.1).update(param, grad, state)[0],
        (params[0].clone().requires_grad_(), grads[0].clone().requires_grad_()),
    )
