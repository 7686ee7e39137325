"""Rules that precondition matrices on both sides: their formulas in float64, and identities."""

from itertools import pairwise
from typing import Any

import optree
import torch

from functional_optim import galore_adamw, kl_soap, kron, shampoo
from functional_optim.algorithms.kron import kron_coefficients
from functional_optim.core.random_normal import counter_of, normal_like
from tests.choices import case, pairs
from tests.core.support import noise, steps

from .formulas_shampoo import (
    galore_formula,
    kl_soap_formula,
    kron_formula,
    normal_numbers,
    shampoo_formula,
)

STEPS = 20


def test_shampoo_is_its_formula() -> None:
    """Shampoo matches its formula.

    Some blocks do not divide the sides, and some steps compute no new roots.
    """
    for one in pairs(
        shape=[(3, 3), (3, 5), (5, 2)],
        betas=[(0.9, 1.0), (0.0, 0.9), (0.5, 0.99)],
        block_size=[2, 3, 9],
        graft=[None, "sgd", "adagrad", "rmsprop", "adam"],
        precondition_frequency=[1, 3],
        start_preconditioning_step=[1, 4],
        exponent=[0.25, 0.5],
        eps=[1e-6, 1e-2],
        weight_decay=[0.0, 0.3],
        root_dtype=[None, "float64"],
    ):
        hyper = {name: value for name, value in one.items() if name != "shape"}
        hyper.update(lr=0.1, graft_beta=0.9, graft_eps=1e-6)
        start, grads = noise(0, *one["shape"]), [noise(k + 1, *one["shape"]) for k in range(STEPS)]
        end, state = steps(shampoo(**hyper), start, lambda k, of=grads: of[k], STEPS)
        want, average = shampoo_formula(start, grads, hyper)
        with case(**one):
            torch.testing.assert_close(end - start, want - start, rtol=1e-9, atol=1e-11)
            made = state.leaves.stages[-1].exp_avg
            torch.testing.assert_close(made, average, rtol=1e-12, atol=1e-14)


def test_kl_soap_is_its_formula() -> None:
    """KL-SOAP matches its formula, at refreshes and between them.

    Gradients are so small that eigenvalues reach their limit. The longer side of an oblong matrix
    is not preconditioned, since one gradient does not determine all its eigenvectors.
    """
    for one in pairs(
        shape=[(12, 12), (3, 5), (5, 2)],
        betas=[(0.9, 0.98), (0.5, 0.8)],
        shampoo_beta=[0.5, 0.98],
        precondition_frequency=[1, 3],
        initial_eigenvalue=[0.1, 2.0],
        max_inverse_root=[11, 4000],
        correct_bias=[True, False],
        weight_decay=[0.0, 0.3],
    ):
        hyper = {name: value for name, value in one.items() if name != "shape"}
        hyper.update(lr=0.1, eps=1e-3, max_precond_dim=min(one["shape"]))
        start = noise(0, *one["shape"])
        grads = [0.03 * noise(k + 1, *one["shape"]) for k in range(STEPS)]
        end, state = steps(kl_soap(**hyper), start, lambda k, of=grads: of[k], STEPS)
        want, average, values = kl_soap_formula(start, grads, hyper)
        made = state.leaves.stages[-1]
        with case(**one):
            torch.testing.assert_close(end - start, want - start, rtol=1e-7, atol=1e-9)
            torch.testing.assert_close(made.exp_avg, average, rtol=1e-12, atol=1e-14)
            for found, wanted in zip((made.left_values, made.right_values), values, strict=True):
                if found:
                    torch.testing.assert_close(found[0], wanted, rtol=1e-7, atol=1e-9)


DIAGONAL = {
    (None, 3, 5): (False, False),
    (None, 1, 5): (True, False),
    (None, 9, 2): (True, False),
    ("one_diag", 3, 5): (False, True),
    ("one_diag", 3, 3): (False, True),
    ("smart_one_diag", 5, 3): (True, False),
    ("smart_one_diag", 3, 3): (False, False),
    ("all_diag", 3, 5): (True, True),
}
"""Diagonal factors, by mode and shape. Sides of one row, or of more than 8, are included."""


def test_kron_is_its_formula() -> None:
    for one in pairs(
        kind=list(DIAGONAL),
        beta=[0.0, 0.9],
        precond_lr=[0.1, 0.5],
        precond_init_scale=[1.0, 0.3],
        max_update_rms=[0.5, float("inf")],
        update_probability=[0.6, 1.0],
        min_update_probability=[0.0, 0.3],
        update_decay=[0.0, 0.5],
        flat_start=[0, 3],
        momentum_into_precond_update=[True, False],
        weight_decay=[0.0, 0.3],
        seed=[0, 7],
    ):
        mode, *shape = one["kind"]
        hyper = {name: value for name, value in one.items() if name != "kind"}
        hyper.update(lr=0.1)
        start, grads = noise(0, *shape), [noise(k + 1, *shape) for k in range(STEPS)]
        ours = kron(memory_save_mode=mode, max_size_triangular=8, **hyper)
        end, state = steps(ours, start, lambda k, of=grads: of[k], STEPS)
        diagonal = DIAGONAL[one["kind"]]
        want, average, *factors = kron_formula(start, grads, {**hyper, "diagonal": diagonal})
        made = state.leaves.stages[-1]
        with case(**one):
            torch.testing.assert_close(end - start, want - start, rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(made.exp_avg, average, rtol=1e-12, atol=1e-14)
            assert int(made.counter) == (hyper["seed"] << 32) + STEPS
            for kept, wanted, is_vector in zip(made[1:3], factors, diagonal, strict=True):
                found = torch.diag(kept) if is_vector else kept
                torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


def test_normal_numbers_are_normal_and_a_function_of_the_counter() -> None:
    counter = counter_of(5, torch.ones(1)) + 9
    draws = normal_like(torch.zeros(300, 200).double(), counter)
    torch.testing.assert_close(draws[:2], normal_numbers((2, 200), 5, 9), rtol=1e-13, atol=1e-15)
    # Tolerances are five standard deviations of the moments of 60,000 numbers.
    assert abs(float(draws.mean())) < 5 / 60_000**0.5
    assert abs(float(draws.square().mean()) - 1) < 5 * (2 / 60_000) ** 0.5
    assert abs(float(draws.pow(4).mean()) - 3) < 5 * (96 / 60_000) ** 0.5
    assert float(torch.corrcoef(draws).triu(1).abs().max()) < 6 / 200**0.5
    later = normal_like(torch.zeros(300, 200).double(), counter + 1)
    other = normal_like(torch.zeros(300, 200).double(), counter_of(6, counter) + 9)
    for one in (later, other):
        assert abs(float((draws * one).mean())) < 5 / 60_000**0.5


def test_krons_steps_that_fit_are_the_given_part_and_evenly_spread() -> None:
    for part in (0.03, 0.3, 1.0):
        parts = {"update_probability": part, "min_update_probability": part}
        hyper = kron(**parts).links[-1].hyper
        made = [kron_coefficients(float(step), hyper) for step in range(1, 20_001)]
        places = [step for step, one in enumerate(made) if one.update]
        gaps = {later - before for before, later in pairwise(places)}
        with case(part=part):
            assert abs(len(places) / 20_000 - part) < 1e-3
            assert max(gaps) < 2 / part
            assert all(one.update for one in made if one.balance)
            assert abs(sum(one.balance for one in made) / 20_000 - part / 100) < 3e-4


def test_galore_is_its_formula() -> None:
    for one in pairs(
        shape=[(3, 3), (3, 5), (5, 2), (1, 4)],
        betas=[(0.9, 0.99), (0.0, 0.5)],
        rank=[1, 2, 9],
        update_proj_gap=[1, 3, 200],
        scale=[0.25, 1.0],
        weight_decay=[0.0, 0.3],
        eps=[1e-6, 1e-2],
    ):
        hyper = {name: value for name, value in one.items() if name != "shape"}
        hyper.update(lr=0.1)
        start, grads = noise(0, *one["shape"]), [noise(k + 1, *one["shape"]) for k in range(STEPS)]
        end, state = steps(galore_adamw(**hyper), start, lambda k, of=grads: of[k], STEPS)
        want, average = galore_formula(start, grads, hyper)
        with case(**one):
            torch.testing.assert_close(end - start, want - start, rtol=1e-8, atol=1e-10)
            made = state.leaves.stages[-1]
            torch.testing.assert_close(made.exp_avg, average, rtol=1e-10, atol=1e-12)


def test_galores_steps_do_not_depend_on_the_signs_of_singular_vectors() -> None:
    """Negated columns give negated steps of GaLore, also when it computes a new basis."""
    start, grads = noise(0, 5, 3), [noise(k + 1, 5, 3) for k in range(STEPS)]
    signs = torch.tensor([1.0, -1.0, -1.0]).double()
    for side in (start, start.T):
        turn = signs if side is start else signs[:, None]
        given = [one if side is start else one.T for one in grads]
        optimizer = galore_adamw(lr=0.1, rank=2, update_proj_gap=3, weight_decay=0.1)
        found, _ = steps(optimizer, side, lambda k, of=given: of[k], STEPS)
        other, _ = steps(optimizer, side * turn, lambda k, of=given, by=turn: of[k] * by, STEPS)
        torch.testing.assert_close(other, found * turn, rtol=1e-10, atol=1e-12)


def test_stacks_of_matrices_are_stepped_as_each_matrix_is() -> None:
    """Rules step a stack of matrices like each matrix alone.

    The test uses float64, and longer sides keep their basis, so that rounding cannot choose
    another.
    """
    optimizers = {
        "shampoo": shampoo(0.1, (0.9, 0.9), eps=1e-2, block_size=3, graft="adam"),
        "shampoo in one block": shampoo(0.1, eps=1e-2),
        "kl_soap": kl_soap(0.1, precondition_frequency=2, max_precond_dim=4),
        "kron": kron(0.1),
        "kron on diagonals": kron(0.1, memory_save_mode="one_diag"),
        "galore_adamw": galore_adamw(0.1, rank=2, update_proj_gap=2),
    }
    for one in pairs(name=list(optimizers), shape=[(4, 6), (5, 2), (1, 3)]):
        stage, hyper = optimizers[one["name"]].links[-1][:2]
        alone = [
            (noise(k, *one["shape"]), stage.init(noise(k, *one["shape"]), hyper)) for k in (0, 1)
        ]
        together = _stacked(alone)
        for step in range(1, 6):
            coefficients = stage.coefficients(float(step), hyper)
            grads = [noise(9 * step + k, *one["shape"]) for k in (0, 1)]
            alone = [
                stage.rule(param, grad, state, coefficients)
                for (param, state), grad in zip(alone, grads, strict=True)
            ]
            together = stage.rule(together[0], torch.stack(grads), together[1], coefficients)
        with case(**one):
            torch.testing.assert_close(together, _stacked(alone), rtol=1e-9, atol=1e-11)


def _stacked(trees: list[Any]) -> Any:
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *trees)
