"""Rules for whole matrices: refused parameters, formulas in float64, and identities."""

from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, adamw, kl_soap, muon, sgd, shampoo, soap
from functional_optim.algorithms.soap import SOAP, soap_coefficients
from functional_optim.core.matrices import norms
from functional_optim.numeric import addmm
from functional_optim.testing import CASES
from tests.choices import each_value

from ..choices import case, pairs
from .scenarios import assert_steps_alike
from .soap_formula import soap_formula
from .support import MATRICES, noise, steps
from .twins import Twin, assert_twins, in_place, pure

MADE = {name: CASES[name].factory() for name in sorted(MATRICES)}


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


def test_muons_steps_are_about_orthogonal() -> None:
    """Newton-Schulz drives the singular values to between about 0.7 and 1.2."""
    for shape in ((6, 6), (4, 9), (9, 4)):
        for one in pairs(nesterov=[True, False], adjust_lr_fn=[None, "match_rms_adamw"]):
            start, grad = noise(0, *shape), noise(1, *shape)
            optimizer = muon(lr=1.0, weight_decay=0.0, momentum=0.0, ns_steps=6, **one)
            new, _ = optimizer.update(start, grad, optimizer.init(start))
            factor = max(1.0, shape[0] / shape[1]) ** 0.5
            if one["adjust_lr_fn"]:
                factor = 0.2 * max(shape) ** 0.5
            step = (start - new) / factor
            with case(shape=shape, **one):
                values = torch.linalg.svdvals(step)
                assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
                # The step has the singular vectors of the gradient.
                assert (
                    float((step * grad).sum()) > 0.8 * float(torch.linalg.svdvals(grad).sum()) - 1
                )


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


def test_soap_in_the_own_basis_is_adamw_one_step_later() -> None:
    """No side is rotated, because max_precond_dim is 0."""
    hyper: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.0}
    start = noise(0, 3, 4)
    grads = [noise(k + 1, 3, 4) for k in range(5)]
    ours, _ = steps(soap(**hyper, max_precond_dim=0), start, lambda k: grads[k], 5)
    adams, _ = steps(adamw(**hyper), start, lambda k: grads[k + 1], 4)
    torch.testing.assert_close(ours - start, adams - start, rtol=1e-12, atol=1e-14)


def test_soap_that_never_refreshes_is_adamw_in_a_fixed_basis() -> None:
    """The optimizer rotates one side, or both."""
    hyper: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.0}
    start = noise(0, 3, 4)
    grads = [noise(k + 1, 3, 4) for k in range(5)]
    for most in (3, 4):
        optimizer = soap(**hyper, precondition_frequency=1000, max_precond_dim=most)
        ours, state = steps(optimizer, start, lambda k: grads[k], 5)
        kept = state.leaves.stages[-1]
        left = torch.linalg.eigh(grads[0] @ grads[0].T)[1].flip(1)
        right = torch.eye(4).double()
        if most == 4:
            right = torch.linalg.eigh(grads[0].T @ grads[0])[1].flip(1)
        turned = [left.T @ one @ right for one in grads]
        adams, _ = steps(adamw(**hyper), left.T @ start @ right, lambda k, of=turned: of[k + 1], 4)
        with case(most=most):
            assert [len(side) for side in (kept.left, kept.right)] == [1, most - 3]
            torch.testing.assert_close(ours, left @ adams @ right.T, rtol=1e-9, atol=1e-11)


def test_soaps_first_step_moves_nothing_and_its_bases_are_orthogonal() -> None:
    start = noise(0, 4, 3)
    new, state = steps(soap(0.1, weight_decay=0.0), start, lambda k: noise(k + 1, 4, 3), 1)
    assert torch.equal(new, start)
    _, state = steps(soap(0.1, precondition_frequency=2), start, lambda k: noise(k + 1, 4, 3), 9)
    kept = state.leaves.stages[-1]
    for (basis,), (factor,) in ((kept.left_basis, kept.left), (kept.right_basis, kept.right)):
        torch.testing.assert_close(basis.T @ basis, torch.eye(len(basis)).double())
        turned = basis.T @ factor @ basis
        assert float((turned - turned.diag().diag()).norm()) < 0.5 * float(factor.norm())


def test_the_phases_of_soap_come_by_the_number_of_the_step() -> None:
    hyper = SOAP(
        lr=0.1,
        betas=(0.9, 0.9),
        shampoo_beta=0.9,
        eps=1e-8,
        precondition_frequency=3,
        max_precond_dim=9,
    ).hyper
    made = [soap_coefficients(float(step), hyper) for step in range(1, 9)]
    assert [one.first for one in made] == [True] + 7 * [False]
    assert [one.refresh for one in made[1:]] == [False, False, True, False, False, True, False]


def test_a_stack_has_of_each_matrix_what_the_matrix_has() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        several = noise(0, 5, 4, 6, dtype=dtype)
        with case(dtype=dtype):
            assert torch.equal(
                norms(several).flatten(), torch.stack([one.norm() for one in several])
            )
            square, factor = several @ several.mT, torch.tensor(0.5, dtype=torch.float64)
            for beta, alpha in ((0.5, 2.0), (factor, 2.0), (0.5, 4 * factor)):
                made = addmm(several, square, several, beta, alpha)  # type: ignore[arg-type]
                for one, alone, a in zip(made, several, square, strict=True):
                    close = addmm(alone, a, alone, 0.5, 2.0)
                    room = 4 * torch.finfo(dtype).eps * float(close.double().norm())
                    assert float((one - close).double().norm()) <= room


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
