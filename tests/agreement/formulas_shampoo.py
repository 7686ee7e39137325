"""Rules that precondition matrices on both sides: their papers' formulas in float64."""

import math
from collections.abc import Callable
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from functional_optim import Optimizer, algorithms

Values = list[float]
Formula = Callable[[Tensor, list[Tensor], dict[str, Any]], tuple[Tensor, ...]]


def inverse_power(factor: Tensor, exponent: float, eps: float) -> Tensor:
    """Return ``(factor + eps * I) ^ -exponent`` of a positive semidefinite matrix, by its SVD."""
    vectors, values, _ = torch.linalg.svd(factor)
    return vectors @ torch.diag((values + eps) ** -exponent) @ vectors.T


def graft_formula(
    g: Tensor, u: Tensor, v: Tensor, number: int, c: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the direction of the graft, and the new average of squares."""
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
    """Return parameter and m by algorithm 2 of Shi et al. 2023. Blocks are separate matrices."""
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
    """Return a formula on flat lists, which hold the elements of matrices of five rows."""

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


def kl_soap_formula(  # noqa: C901  one formula, and sides that may be without it
    start: Tensor, grads: list[Tensor], c: dict[str, Any]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return parameter, m and eigenvalues by Lin et al. 2025, with inverses of whole factors."""
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
    "eps": 0.1,
    "weight_decay": 0.01,
    "precondition_frequency": 2,
    "max_precond_dim": 5,
    "initial_eigenvalue": 0.1,
    "max_inverse_root": 4000,
    "correct_bias": False,
}


def word_hash(word: int) -> int:
    """Return the hash of a 32-bit word."""
    word = (word ^ (word >> 16)) * 0x21F0AAAD % 2**32
    word = (word ^ (word >> 15)) * 0x735A2D97 % 2**32
    return word ^ (word >> 15)


def normal_numbers(shape: tuple[int, int], seed: int, made: int) -> Tensor:
    """Return the normal numbers of a step, computed element by element."""
    key = word_hash(made) + word_hash(word_hash(seed))
    words = [word_hash((place + key) % 2**32) for place in range(1, 1 + shape[0] * shape[1])]
    draws = [NormalDist().inv_cdf((2 * word + 1) / 2**33) for word in words]
    return torch.tensor(draws, dtype=torch.float64).reshape(shape)


def spectral_bound(x: Tensor) -> float:
    """Return a lower bound of the spectral norm of a symmetric matrix."""
    column = max(x.unbind(1), key=lambda one: float(one.norm()))
    image = x @ column
    return float((x @ (image / image.norm())).norm())


def kron_factor(q: Tensor, a: Tensor, b: Tensor, c: dict[str, Any], *, diagonal: bool) -> Tensor:
    """Return one factor after one update. A diagonal factor is returned as a matrix, too."""
    one, other = a @ a.T, b @ b.T
    if diagonal:
        one, other = one.diagonal().diag(), other.diagonal().diag()
    norm = float((one + other).max()) if diagonal else spectral_bound(one + other)
    return q - c["precond_lr"] / norm * (one - other).triu() @ q


def kron_formula(start: Tensor, grads: list[Tensor], c: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return parameter, m and both factors of PSGD-Kron, with inverses of whole matrices."""
    p, m, golden = start.clone(), torch.zeros_like(start), (math.sqrt(5) - 1) / 2
    scale = math.sqrt(c["precond_init_scale"])
    left, right = (scale * torch.eye(size).double() for size in start.shape)
    for number, g in enumerate(grads, start=1):
        m = c["beta"] * m + (1 - c["beta"]) * g
        u = m / (1 - c["beta"] ** number)
        part = math.exp(-c["update_decay"] * max(0, number - 1 - c["flat_start"]))
        part = max(c["min_update_probability"], c["update_probability"] * part)
        place = number * golden % 1
        if place < part / 100:
            ratio = math.sqrt(float(right.abs().max() / left.abs().max()))
            left, right = left * ratio, right / ratio
        if place < part:
            draws = normal_numbers((start.shape[0], start.shape[1]), c["seed"], number - 1)
            seen = u if c["momentum_into_precond_update"] else g
            a = left @ (seen + math.sqrt(2**-23) * seen.abs().mean() * draws) @ right.T
            b = torch.linalg.inv(left).T @ draws @ torch.linalg.inv(right)
            left = kron_factor(left, a, b, c, diagonal=c["diagonal"][0])
            right = kron_factor(right, a.T, b.T, c, diagonal=c["diagonal"][1])
        d = left.T @ left @ u @ right.T @ right
        d = d * min(1.0, c["max_update_rms"] / (float(d.square().mean().sqrt()) + 1e-12))
        p = (1 - c["lr"] * c["weight_decay"]) * p - c["lr"] * d
    return p, m, left, right


KRON = {
    "lr": 0.1,
    "beta": 0.9,
    "weight_decay": 0.01,
    "precond_lr": 0.1,
    "precond_init_scale": 1.0,
    "max_update_rms": 1.1,
    "update_probability": 1.0,
    "min_update_probability": 0.03,
    "update_decay": 0.5,
    "flat_start": 2,
    "momentum_into_precond_update": True,
    "memory_save_mode": "one_diag",
    "seed": 3,
}


def galore_formula(start: Tensor, grads: list[Tensor], c: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return parameter and m by algorithm 2 of Zhao et al. 2024.

    A wide matrix is projected from the left.
    """
    (b1, b2), rank, wide = c["betas"], min(c["rank"], *start.shape), start.shape[0] < start.shape[1]
    p, m, v = start.clone(), *[torch.zeros(()).double()] * 2
    basis = torch.eye(min(start.shape), rank).double()
    for number, g in enumerate(grads, start=1):
        if number % c["update_proj_gap"] == 1 % c["update_proj_gap"]:
            left, _, right = torch.linalg.svd(g, full_matrices=False)
            vectors = left[:, :rank] if wide else right[:rank].T
            products = (vectors * basis).sum(0)
            basis = torch.stack(
                [-one if float(w) < 0 else one for one, w in zip(vectors.T, products, strict=True)],
                1,
            )
        seen = basis.T @ g if wide else g @ basis
        m, v = b1 * m + (1 - b1) * seen, b2 * v + (1 - b2) * seen**2
        ratio = m / (1 - b1**number) / ((v / (1 - b2**number)).sqrt() + c["eps"])
        step = basis @ ratio if wide else ratio @ basis.T
        p = p * (1 - c["lr"] * c["weight_decay"]) - c["lr"] * c["scale"] * step
    return p, m


GALORE = {
    "lr": 0.1,
    "betas": (0.9, 0.99),
    "eps": 0.1,
    "weight_decay": 0.01,
    "rank": 3,
    "update_proj_gap": 3,
    "scale": 0.25,
}


def soap_formula(
    start: Tensor, grads: list[Tensor], c: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameter, m and v by algorithm 3 of Vyas et al., with loops over columns."""
    lr, (b1, b2), bs, decay = c["lr"], c["betas"], c["shampoo_beta"], c["weight_decay"]
    p, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    sides = [torch.zeros(size, size).double() for size in start.shape]
    bases = [torch.eye(size).double() for size in start.shape]
    turned = [side for side in (0, 1) if start.shape[side] <= c["max_precond_dim"]]
    for number, g in enumerate(grads):
        p = p * (1 - lr * decay)
        if number:
            seen = bases[0].T @ g @ bases[1]
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * seen**2
            inside = bases[0].T @ (m / (1 - b1**number)) @ bases[1]
            ratio = inside / ((v / (1 - b2**number)).sqrt() + c["eps"])
            p = p - lr * bases[0] @ ratio @ bases[1].T
        sides = [bs * sides[0] + (1 - bs) * g @ g.T, bs * sides[1] + (1 - bs) * g.T @ g]
        if number == 0:
            for side in turned:
                sizes, vectors = torch.linalg.eigh(sides[side])
                bases[side] = vectors[:, sizes.argsort(descending=True)]
        elif number % c["precondition_frequency"] == 0:
            for side in turned:
                columns = bases[side].unbind(1)
                sizes = [float(q @ sides[side] @ q) for q in columns]
                places = sorted(range(len(sizes)), key=lambda k, of=sizes: -of[k])
                v = v[places] if side == 0 else v[:, places]
                basis = torch.stack([columns[k] for k in places], 1)
                bases[side] = torch.linalg.qr(sides[side] @ basis).Q
    return p, m, v


SOAP = {
    "lr": 0.1,
    "betas": (0.9, 0.95),
    "shampoo_beta": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "precondition_frequency": 2,
    "max_precond_dim": 5,
}


def _entry(name: str, formula: Formula, hyper: dict[str, Any], **more: Any) -> Any:
    return partial(getattr(algorithms, name), **hyper), as_lists(formula, {**hyper, **more})


SHAMPOO_FORMULAS: dict[str, tuple[Callable[[], Optimizer], Callable[..., Any]]] = {
    "galore_adamw": _entry("galore_adamw", galore_formula, GALORE),
    "kl_soap": _entry("kl_soap", kl_soap_formula, KL_SOAP),
    "kron": _entry("kron", kron_formula, KRON, diagonal=(False, True)),
    "shampoo": _entry("shampoo", shampoo_formula, SHAMPOO),
    "soap": _entry("soap", soap_formula, SOAP),
}
"""Constructors and formulas, for the table of agreement."""
