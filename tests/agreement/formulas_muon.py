"""Formulas of the papers for matrices, on lists of floats, without tensors and without our code.

A matrix is a list of rows. Each formula takes a matrix and its gradients, and returns the matrix
and the momentum after the last step.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

from functional_optim import Optimizer, dion, normuon, scion

Matrix = list[list[float]]
Polynomials = Sequence[tuple[float, float, float]]

KELLER = ((3.4445, -4.7750, 2.0315),) * 5


def product(x: Matrix, y: Matrix) -> Matrix:
    columns = list(zip(*y, strict=True))
    return [[math.fsum(map(float.__mul__, row, one)) for one in columns] for row in x]


def transposed(x: Matrix) -> Matrix:
    return [list(one) for one in zip(*x, strict=True)]


def combined(a: float, x: Matrix, b: float, y: Matrix) -> Matrix:
    return [[a * i + b * j for i, j in zip(r, s, strict=True)] for r, s in zip(x, y, strict=True)]


def scaled(a: float, x: Matrix) -> Matrix:
    return [[a * one for one in row] for row in x]


def norm(x: Matrix) -> float:
    return math.hypot(*(one for row in x for one in row))


def polar(x: Matrix, polynomials: Polynomials = KELLER, eps: float = 1e-7) -> Matrix:
    """Follow Jordan et al. 2024: x / (|x| + eps), then a x + b (x x^T) x + c (x x^T)^2 x."""
    if len(x) > len(x[0]):
        return transposed(polar(transposed(x), polynomials, eps))
    x = scaled(1 / (norm(x) + eps), x)
    for a, b, c in polynomials:
        gram = product(x, transposed(x))
        x = combined(a, x, 1.0, product(combined(b, gram, c, product(gram, gram)), x))
    return x


def momentum_of(m: Matrix, g: Matrix, mu: float, *, nesterov: bool) -> tuple[Matrix, Matrix]:
    m = combined(mu, m, 1 - mu, g)
    return m, combined(mu, m, 1 - mu, g) if nesterov else m


def zeros_like(x: Matrix) -> Matrix:
    return scaled(0.0, x)


def muon_formula(
    p: Matrix,
    grads: Sequence[Matrix],
    *,
    scale: Callable[[int, int], float],
    lr: float = 0.1,
    decay: float = 0.01,
    nesterov: bool = True,
    polynomials: Polynomials = KELLER,
) -> tuple[Matrix, Matrix]:
    """Follow Jordan et al. 2024 with mu 0.95, and a factor that depends on the shape."""
    m = zeros_like(p)
    for g in grads:
        m, u = momentum_of(m, g, 0.95, nesterov=nesterov)
        size = lr * scale(len(p), len(p[0]))
        p = combined(1 - lr * decay, p, -size, polar(u, polynomials))
    return p, m


def normuon_formula(
    p: Matrix, grads: Sequence[Matrix], *, paper: bool, lr: float = 0.1, decay: float = 0.01
) -> tuple[Matrix, Matrix]:
    """Follow algorithm 1 of Li et al. 2025 (``paper``), or the authors' program.

    mu and b2 are 0.95.
    """
    m, v = zeros_like(p), [0.0] * len(p)
    rows, columns = len(p), len(p[0])
    for g in grads:
        m, u = momentum_of(m, g, 0.95, nesterov=not paper)
        o = polar(u)
        means = [sum(one * one for one in row) / columns for row in o]
        v = [0.95 * a + 0.05 * b for a, b in zip(v, means, strict=True)]
        n = [[one / (math.sqrt(a) + 1e-10) for one in row] for row, a in zip(o, v, strict=True)]
        size = norm(o) * math.sqrt(max(1.0, rows / columns))
        if paper:
            size = 0.2 * math.sqrt(rows * columns)
        p = combined(1 - lr * decay, p, -lr * size / (norm(n) + 1e-10), n)
    return p, m


def lmo(d: Matrix, kind: str) -> Matrix:
    """Return the direction of a norm by Pethick et al. 2025, without its sign and radius.

    Lengths are larger by 1e-8, as in the authors' program.
    """
    rows, columns = len(d), len(d[0])
    if kind == "spectral":
        return scaled(math.sqrt(rows / columns), polar(d))
    if kind == "sign":
        return [[math.copysign(1.0, one) / columns if one else 0.0 for one in row] for row in d]
    if kind == "row_norm":
        return [[one / (math.hypot(*row) * math.sqrt(columns) + 1e-8) for one in row] for row in d]
    assert kind == "col_norm"
    turned = transposed(d)
    return transposed(
        [[one / (math.hypot(*c) / math.sqrt(rows) + 1e-8) for one in c] for c in turned]
    )


def scion_formula(
    p: Matrix,
    grads: Sequence[Matrix],
    *,
    kind: str = "spectral",
    unconstrained: bool = False,
    lr: float = 0.1,
    radius: float = 3.0,
) -> tuple[Matrix, Matrix]:
    """Follow algorithms 1 and 2 of Pethick et al. 2025, with mu 0.9."""
    m = zeros_like(p)
    for g in grads:
        m = combined(0.9, m, 0.1, g)
        p = combined(1.0 if unconstrained else 1 - lr, p, -lr * radius, lmo(m, kind))
    return p, m


def orthonormal_columns(x: Matrix) -> Matrix:
    """Return orthonormal columns by two rounds of Gram-Schmidt.

    The signs of the columns do not matter, since no step depends on them.
    """
    found: Matrix = []
    for one in transposed(x):
        column = one
        for _ in range(2):
            for other in found:
                part = math.fsum(map(float.__mul__, column, other))
                column = [a - part * b for a, b in zip(column, other, strict=True)]
        length = math.hypot(*column)
        found.append([a / length for a in column])
    return transposed(found)


def dion_formula(
    p: Matrix,
    grads: Sequence[Matrix],
    *,
    rank: int,
    lr: float = 0.1,
    decay: float = 0.01,
    mu: float = 0.95,
) -> tuple[Matrix, Matrix]:
    """Follow algorithm 1 of Ahn et al. 2025 with eps 1e-8. The first basis is made of cosines."""
    rows, columns = len(p), len(p[0])
    q = [
        [
            math.sqrt((1 if k == 0 else 2) / columns) * math.cos(math.pi * (i + 0.5) * k / columns)
            for k in range(min(rank, rows, columns))
        ]
        for i in range(columns)
    ]
    m = zeros_like(p)
    for g in grads:
        b = combined(1.0, m, 1.0, g)
        left = orthonormal_columns(product(b, q))
        r = product(transposed(b), left)
        m = combined(1.0, b, mu - 1.0, product(left, transposed(r)))
        lengths = [math.hypot(*one) + 1e-8 for one in zip(*r, strict=True)]
        q = [[a / length for a, length in zip(row, lengths, strict=True)] for row in r]
        size = lr * math.sqrt(rows / columns)
        p = combined(1 - lr * decay, p, -size, product(left, transposed(q)))
    return p, m


def run_formula(
    formula: Callable[..., tuple[Matrix, Matrix]], p: list[float], grads: list[list[float]]
) -> tuple[list[float], list[float]]:
    """Run a formula on flat lists, as matrices of 5 rows and 100 columns."""
    p_matrix, *rest = ([one[k : k + 100] for k in range(0, 500, 100)] for one in (p, *grads))
    end, momentum = formula(p_matrix, rest)
    return [*chain(*end)], [*chain(*momentum)]


Values = list[float]
MUON_FORMULAS: dict[str, tuple[Callable[[], Optimizer], Callable[..., tuple[Values, Values]]]] = {
    "normuon": (
        lambda: normuon(0.1, 0.01, iteration_dtype="float64"),
        partial(run_formula, partial(normuon_formula, paper=False)),
    ),
    "scion": (
        lambda: scion(0.1, scale=3.0, iteration_dtype="float64"),
        partial(run_formula, scion_formula),
    ),
    "dion": (lambda: dion(0.1, 0.01, rank=3), partial(run_formula, partial(dion_formula, rank=3))),
}
"""Constructors and formulas, for the table of agreement."""
