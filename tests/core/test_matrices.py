"""Rules for whole matrices: refused parameters, SOAP's formula, and rounding as in torch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, galore_adamw, kl_soap, muon, sgd, shampoo, soap
from tests.agreement.formulas_shampoo import soap_formula
from tests.cases import CASES
from tests.choices import each_value

from ..choices import case, pairs
from .scenarios import assert_steps_alike
from .support import MATRICES, noise, steps
from .twins import Twin, assert_twins, in_place, pure

MADE = {
    **{name: CASES[name].factory() for name in sorted(MATRICES)},
    "galore of a low rank": galore_adamw(rank=2, update_proj_gap=2),
}


@each_value(optimizer=MADE)
def test_only_real_matrices_are_taken(optimizer: Optimizer) -> None:
    """The error comes before the first step, and names the shape and a way out."""
    for param in (torch.ones(()), torch.ones(3), torch.ones(2, 2, 2), torch.ones(2, 2) * 1j):
        with (
            case(shape=param.shape, dtype=param.dtype),
            pytest.raises(ValueError, match=r"2 dimensions, got .* of shape \(.*partition"),
        ):
            optimizer.init({"w": torch.ones(2, 2), "odd": param})


@each_value(optimizer=MADE, executor=["blocked", "auto"], dtype=[16, 32, 64])
def test_executors_step_them_in_place_and_purely(
    optimizer: Optimizer, executor: Any, dtype: int
) -> None:
    """All matrices have different shapes, so that none is stacked, and every bit is compared."""
    kinds = {16: torch.bfloat16, 32: torch.float32, 64: torch.float64}

    def scenario(step: int) -> dict[str, Any]:
        wide = noise(step, 5, 17, dtype=kinds[dtype])
        tall = noise(step + 9, 18, 7, dtype=kinds[dtype])[::2, 1::3]
        return {"t": wide.t(), "s": tall, "c": None if step == 2 else wide[:, :3].contiguous()}

    assert_steps_alike(optimizer, scenario, executor)


def test_soap_is_the_formula() -> None:
    """The comparison is in float64, at refreshes and between them.

    Only the shorter side of an oblong matrix is rotated: a single gradient does not determine all
    eigenvectors of the longer side.
    """
    for one in pairs(
        shape=[(3, 3), (3, 5), (5, 2)],
        betas=[(0.9, 0.8), (0.5, 0.99)],
        shampoo_beta=[0.0, 0.7],
        precondition_frequency=[1, 2, 3],
        weight_decay=[0.0, 0.3],
    ):
        hyper = {key: value for key, value in one.items() if key != "shape"}
        hyper.update(lr=0.1, eps=1e-6, max_precond_dim=min(one["shape"]))
        start, grads = noise(0, *one["shape"]), [noise(k + 1, *one["shape"]) for k in range(6)]
        end, state = steps(soap(**hyper), start, lambda k, of=grads: of[k], 6)
        want, _, square = soap_formula(start, grads, hyper)
        with case(**one):
            # The sign of a basis vector is arbitrary, and affects neither the parameters nor v.
            torch.testing.assert_close(end - start, want - start, rtol=1e-7, atol=1e-9)
            made = state.leaves.stages[-1].exp_avg_sq
            torch.testing.assert_close(made, square, rtol=1e-6, atol=1e-9)


def test_a_numbers_tensor_has_its_derivative_through_muon() -> None:
    """Coefficients of the polynomial can be tensors, and the derivative by the rate is exact."""
    start, grad = noise(0, 3, 4), noise(1, 3, 4)

    def end(lr: Tensor, a: Tensor) -> Tensor:
        optimizer = muon(lr=lr, weight_decay=0.0, ns_coefficients=(a, -4.775, 2.0315))
        return optimizer.update(start, grad, optimizer.init(start))[0].sum()

    lr, a = (torch.tensor(one, dtype=torch.float64) for one in (0.5, 3.4445))
    by_rate, by_a = torch.func.grad(end, argnums=(0, 1))(lr, a)
    slope = (end(lr + 1, a) - end(lr, a)).item()
    assert abs(float(by_rate) - slope) < 1e-9 * max(1.0, abs(slope))
    assert bool(by_a.isfinite())
    assert float(by_a) != 0.0


def test_who_is_no_matrix_goes_to_another_optimizer() -> None:
    """Two optimizers over two trees are the way out that the error names."""
    params = {"w": noise(0, 3, 4), "b": noise(1, 4)}
    for name, optimizer in (("w", muon(0.1)), ("b", sgd(0.1))):
        new, _ = optimizer.update(params[name], params[name], optimizer.init(params[name]))
        assert not torch.equal(new, params[name])


def test_a_sliced_parameter_of_16_bits_is_rounded_as_by_torch() -> None:
    """The decayed parameter has the parameter's layout when the step is added."""
    twin = Twin(CASES["muon"], {"lr": 0.1})
    start, *grads = (noise(seed, 64, 128, dtype=torch.bfloat16)[:, ::2] for seed in range(4))
    start *= 2**-5  # as large as a step
    given = [grad.contiguous() for grad in grads]
    assert_twins(twin, start, given, {"pure": pure, "in place": in_place})


@each_value(optimizer={"soap": soap(), "kl_soap": kl_soap(), "shampoo": shampoo()})
def test_gradients_of_an_embedding_leave_them_finite(optimizer: Optimizer) -> None:
    """Gradients of an embedding give low-rank factors, for which LAPACK's float32 eigh can fail.

    It gives NaN or raises for about one in ten, and the failing ones depend on the machine.
    """
    for seed in range(10):
        chance = torch.Generator().manual_seed(seed)
        param = torch.zeros(376, 4)
        state = optimizer.init(param)
        for _ in range(2):
            words = torch.zeros(32, 376)
            words.scatter_(1, torch.randint(0, 376, (32, 8), generator=chance), 1.0)
            grad = words.T @ torch.randn(32, 4, generator=chance) * 1e-2
            param, state = optimizer.update(param, grad, state)
        with case(seed=seed):
            assert param.isfinite().all()
