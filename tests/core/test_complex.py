"""Complex parameters, which give the bits of their real views in params and state."""

import torch
from torch import Tensor

from functional_optim import Optimizer, adam, sgd
from functional_optim.kernels import ExecutorName
from tests.choices import each_value

from .support import IN_PYTHON, assert_same, noise, step

Z, G = (noise(seed, 4, 3, dtype=torch.complex64) for seed in (0, 1))


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
