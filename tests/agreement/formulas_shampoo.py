"""Rules that precondition matrices on both sides, written out in float64 from their papers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Values = list[float]
Formula = Callable[[Tensor, list[Tensor], dict[str, Any]], tuple[Tensor, ...]]


def inverse_power(factor: Tensor, exponent: float, eps: float) -> Tensor:
    """Return ``(factor + eps * I) ^ -exponent`` of a positive semidefinite matrix, by its SVD."""
    vectors, values, _ = torch.linalg.svd(factor)
    return vectors @ torch.diag((values + eps) ** -exponent) @ vectors.T


def graft_formula(
    g: Tensor, u: Tensor, v: Tensor, number: int, c: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the direction of the graft, and its average of squares."""
    beta, eps = c["graft_beta"], c["graft_eps"]
    if c["graft"] == "adagrad":
        v = v + g**2
        return u / (v.sqrt() + eps), v
    if c["graft"] in ("rmsprop", "adam"):
        v = beta * v + (1 - beta) * g**2
        correction = 1 - beta**number if c["graft"] == "adam" else 1.0
        return u / ((v / correction).sqrt() + eps), v
    return u, v


def shampoo_formula(start: Tensor, grads: list[Tensor], c: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Parameter and m by algorithm 2 of Shi et al. 2023; each block is a matrix of its own."""
    size, (b1, b2) = c["block_size"], c["betas"]
    end, average = start.clone(), torch.zeros_like(start)
    for top in range(0, start.shape[0], size):
        for first in range(0, start.shape[1], size):
            place = slice(top, top + size), slice(first, first + size)
            p, m, v = start[place], torch.zeros_like(start[place]), torch.zeros_like(start[place])
            left, right = (torch.zeros(n, n).double() for n in p.shape)
            roots = [torch.eye(n).double() for n in p.shape]
            for number, whole in enumerate(grads, start=1):
                g = whole[place]
                kept = 1.0 if b2 == 1.0 else 1 - b2
                left, right = b2 * left + kept * g @ g.T, b2 * right + kept * g.T @ g
                m = b1 * m + (1 - b1) * g
                u = m / (1 - b1**number)
                w, v = graft_formula(g, u, v, number, c)
                begin = c["start_preconditioning_step"]
                if number == begin or (
                    number > begin and number % c["precondition_frequency"] == 0
                ):
                    total = 1.0 if b2 == 1.0 else 1 - b2**number
                    roots = [
                        inverse_power(one / total, c["exponent"], c["eps"]) for one in (left, right)
                    ]
                d = w
                if number >= begin:
                    d = roots[0] @ u @ roots[1]
                    if c["graft"] is not None:
                        d = d * w.norm() / d.norm()
                p = (1 - c["lr"] * c["weight_decay"]) * p - c["lr"] * d
            end[place], average[place] = p, m
    return end, average


def as_lists(formula: Formula, hyper: dict[str, Any]) -> Callable[[Values, list[Values]], Any]:
    """Return a formula on lists of numbers: the elements of matrices of five rows."""

    def of_lists(p: Values, grads: list[Values]) -> tuple[Values, Values]:
        matrices = [torch.tensor(one, dtype=torch.float64).reshape(5, -1) for one in (p, *grads)]
        end, kept = formula(matrices[0], matrices[1:], hyper)[:2]
        return end.flatten().tolist(), kept.flatten().tolist()

    return of_lists


SHAMPOO = {
    "lr": 0.1,
    "betas": (0.9, 0.95),
    "eps": 0.1,
    "weight_decay": 0.01,
    "block_size": 5,
    "precondition_frequency": 2,
    "start_preconditioning_step": 1,
    "exponent": 0.25,
    "graft": "adam",
    "graft_beta": 0.999,
    "graft_eps": 1e-8,
}


def kl_soap_formula(
    start: Tensor, grads: list[Tensor], c: dict[str, Any]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Parameter, m and eigenvalues by Lin et al. 2025, with the inverses of whole factors."""
    (b1, b2), bs, sizes = c["betas"], c["shampoo_beta"], start.shape
    p, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    is_turned = [size <= c["max_precond_dim"] for size in sizes]
    factors = [torch.zeros(size, size).double() for size in sizes]
    bases = [torch.eye(size).double() for size in sizes]
    values = [
        torch.full((size,), c["initial_eigenvalue"] if turned else 1.0).double()
        for size, turned in zip(sizes, is_turned, strict=True)
    ]
    for number, g in enumerate(grads):
        p = p * (1 - c["lr"] * c["weight_decay"])
        inverses = [q @ torch.diag(1 / one) @ q.T for q, one in zip(bases, values, strict=True)]
        if number == 0:
            inverses = [torch.eye(size).double() for size in sizes]
        new = [g @ inverses[1] @ g.T / sizes[1], g.T @ inverses[0] @ g / sizes[0]]
        factors = [bs * one + (1 - bs) * other for one, other in zip(factors, new, strict=True)]
        if number == 0:
            for side in (0, 1):
                if is_turned[side]:
                    bases[side] = torch.linalg.eigh(factors[side])[1].flip(1)
            continue
        seen = bases[0].T @ g @ bases[1]
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * seen**2
        totals = (1 - b1**number, 1 - b2**number) if c["correct_bias"] else (1.0, 1.0)
        ratio = bases[0].T @ (m / totals[0]) @ bases[1] / ((v / totals[1]).sqrt() + c["eps"])
        p = p - c["lr"] * bases[0] @ ratio @ bases[1].T
        for side in (0, 1):
            if is_turned[side]:
                mean = (bases[side].T @ new[side] @ bases[side]).diagonal()
                least = max(10, min(sizes[side], c["max_inverse_root"])) ** -2
                values[side] = (bs * values[side] + (1 - bs) * mean).clamp(min=least)
        if number % c["precondition_frequency"] == 0:
            for side in (0, 1):
                if is_turned[side]:
                    bases[side] = torch.linalg.qr(factors[side] @ bases[side]).Q
    return p, m, values


KL_SOAP = {
    "lr": 0.1,
    "betas": (0.9, 0.98),
    "shampoo_beta": 0.98,
    "eps": 1e-3,
    "weight_decay": 0.01,
    "precondition_frequency": 2,
    "max_precond_dim": 5,
    "initial_eigenvalue": 0.1,
    "max_inverse_root": 4000,
    "correct_bias": False,
}
