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
