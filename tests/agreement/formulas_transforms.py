"""Formulas of transforms and wrappers, from their papers, in plain Python numbers.

A parameter is a matrix: a list of rows. Each function takes the first parameter and the gradients
of all steps, and returns the last parameter. Rules around the transform are part of the formula.
"""

import math
import struct

Matrix = list[list[float]]


def zeros(like: Matrix) -> Matrix:
    return [[0.0] * len(row) for row in like]


def combined(x: Matrix, y: Matrix, a: float) -> Matrix:
    """Return x + a * y."""
    return [[u + a * v for u, v in zip(r, s, strict=True)] for r, s in zip(x, y, strict=True)]


def times(x: Matrix, a: float) -> Matrix:
    return [[a * u for u in row] for row in x]


def norm(x: Matrix) -> float:
    return math.sqrt(math.fsum(u * u for row in x for u in row))


class Adam:
    """Direction of Adam, by algorithm 1 of Kingma & Ba 2015."""

    def __init__(self, like: Matrix, beta_1: float, beta_2: float) -> None:
        self.m, self.v, self.t = zeros(like), zeros(like), 0
        self.beta_1, self.beta_2 = beta_1, beta_2

    def direction(self, g: Matrix) -> Matrix:
        b1, b2 = self.beta_1, self.beta_2
        self.t += 1
        self.m = combined(times(self.m, b1), g, 1 - b1)
        self.v = combined(times(self.v, b2), [[u * u for u in row] for row in g], 1 - b2)
        c1, c2 = 1 - b1**self.t, 1 - b2**self.t
        return [
            [m / c1 / (math.sqrt(v / c2) + 1e-8) for m, v in zip(ms, vs, strict=True)]
            for ms, vs in zip(self.m, self.v, strict=True)
        ]


def clipped_by_rms(p: Matrix, grads: list[Matrix]) -> Matrix:
    """Follow algorithm 4 of Shazeer & Stern 2018, on Adam's direction: d 0.7, lr 0.1."""
    adam = Adam(p, 0.9, 0.999)
    for g in grads:
        u = adam.direction(g)
        rms = norm(u) / math.sqrt(len(p) * len(p[0]))
        p = combined(p, u, -0.1 / max(1.0, rms / 0.7))
    return p


def centralized(p: Matrix, grads: list[Matrix]) -> Matrix:
    """Follow equation 1 of Yong et al. 2020: lr 0.1."""
    for g in grads:
        means = [math.fsum(row) / len(row) for row in g]
        rows = [[u - mean for u in row] for row, mean in zip(g, means, strict=True)]
        p = combined(p, rows, -0.1)
    return p


def clipped_by_unit(p: Matrix, grads: list[Matrix]) -> Matrix:
    """Follow equation 3 of Brock et al. 2021: clipping 0.2, eps 1e-3, lr 0.1."""
    for g in grads:
        rows = []
        for weights, row in zip(p, g, strict=True):
            limit, size = 0.2 * max(norm([weights]), 1e-3), norm([row])
            rows.append([u * limit / size for u in row] if size > limit else row)
        p = combined(p, rows, -0.1)
    return p


def cautiously_decayed(p: Matrix, grads: list[Matrix]) -> Matrix:
    """Follow algorithm 1 of Chen et al. 2025, with Adam's direction: lr 0.1, lambda 0.3."""
    adam = Adam(p, 0.9, 0.999)
    for g in grads:
        u = adam.direction(g)
        p = [
            [x - 0.1 * (a + 0.3 * (x if a * x >= 0 else 0.0)) for x, a in zip(xs, us, strict=True)]
            for xs, us in zip(p, u, strict=True)
        ]
    return p


def mars_adamw(p: Matrix, grads: list[Matrix], *, from_zero: bool = False) -> Matrix:
    """Follow algorithm 2 of Yuan et al. 2024 with the gradients of the last step.

    The betas are 0.95 and 0.99, lr is 0.1, lambda is 0.01.
    """
    adam = Adam(p, 0.95, 0.99)
    last = zeros(p) if from_zero else grads[0]
    for g in grads:
        c = combined(g, combined(g, last, -1.0), 0.3 * 0.95 / (1 - 0.95))
        c = times(c, 1 / norm(c)) if norm(c) > 1 else c
        last = g
        p = combined(times(p, 1 - 0.1 * 0.01), adam.direction(c), -0.1)
    return p


def mars_from_zero(p: Matrix, grads: list[Matrix]) -> Matrix:
    """Follow the authors' code, which corrects the first gradient, too."""
    return mars_adamw(p, grads, from_zero=True)


def hashed(word: int) -> int:
    word %= 2**32
    word = (word ^ word >> 16) * 0x2C1B3C6D % 2**32
    word = (word ^ word >> 12) * 0x297A2D39 % 2**32
    return word ^ word >> 15


def key_of(p: Matrix) -> int:
    """Return a hash of the bits of float32 values."""
    flat = [struct.unpack("<i", struct.pack("<f", u))[0] for row in p for u in row]
    return hashed(sum(hashed(bits + hashed(i)) for i, bits in enumerate(flat)) + len(flat))


def normal(key: int, step: int, seed: int, index: int) -> float:
    salt = (step * 10368889 + (seed * 7368787 + 1013904223) % 2**24) % 2**24
    word = hashed(index + hashed(key + salt))
    radius = math.sqrt(-2 * math.log((word + 0.5) / 2**32))
    return radius * math.cos(2 * math.pi * hashed(word + 1) / 2**32)


def noisy(p: Matrix, grads: list[Matrix]) -> Matrix:
    """Follow equation 1 of Neelakantan et al. 2015: eta 0.3, gamma 0.55, seed 7, lr 0.1."""
    key, width = key_of(p), len(p[0])
    for step, g in enumerate(grads, start=1):
        deviation = math.sqrt(0.3 / step**0.55)
        z = [[normal(key, step, 7, i * width + j) for j in range(width)] for i in range(len(p))]
        p = combined(p, combined(g, z, deviation), -0.1)
    return p


def kept_row_norms(p: Matrix, grads: list[Matrix]) -> Matrix:
    """Run gradient descent with lr 0.1, and restore the first norm of each row after each step."""
    wanted = [norm([row]) for row in p]
    for g in grads:
        p = combined(p, g, -0.1)
        p = [times([row], r / norm([row]))[0] for row, r in zip(p, wanted, strict=True)]
    return p


def hyperball(p: Matrix, grads: list[Matrix]) -> Matrix:
    """Follow Wen et al. 2026: W = R * Normalize(W - lr * R * Normalize(u)), Adam's u, lr 0.1."""
    radius, adam = norm(p), Adam(p, 0.9, 0.999)
    for g in grads:
        u = adam.direction(g)
        p = combined(p, u, -0.1 * radius / norm(u))
        p = times(p, radius / norm(p))
    return p


def of_radius(p: Matrix, grads: list[Matrix]) -> Matrix:
    """Run gradient descent with lr 0.1, and scale the parameter to norm 2.5 after each step."""
    for g in grads:
        p = combined(p, g, -0.1)
        p = times(p, 2.5 / norm(p))
    return p


def averaged(p: Matrix, grads: list[Matrix]) -> Matrix:
    """Follow algorithm 1 of Izmailov et al. 2018: the mean after steps 5, 8, 11, ... of descent.

    The learning rate of the descent is 0.1.
    """
    members = []
    for step, g in enumerate(grads, start=1):
        p = combined(p, g, -0.1)
        if step >= 5 and (step - 5) % 3 == 0:
            members.append(p)
    total = zeros(p)
    for one in members:
        total = combined(total, one, 1.0)
    return times(total, 1 / len(members))


def tail_averaged(p: Matrix, grads: list[Matrix]) -> Matrix:
    """Return the exponential average of parameters from step 5 on: decay 0.8, descent by 0.1."""
    tail = []
    for step, g in enumerate(grads, start=1):
        p = combined(p, g, -0.1)
        if step >= 5:
            tail.append(p)
    weights = [0.8 ** (len(tail) - 1)]
    weights += [0.2 * 0.8 ** (len(tail) - 1 - k) for k in range(1, len(tail))]
    total = zeros(p)
    for weight, one in zip(weights, tail, strict=True):
        total = combined(total, one, weight)
    return total


def stepped_outside(p: Matrix, grads: list[Matrix]) -> Matrix:
    """Follow algorithm 1 of Douillard et al. 2023: one worker, H 4, outer lr 0.7, momentum 0.9."""
    slow, buffer = p, zeros(p)
    for step, g in enumerate(grads, start=1):
        p = combined(p, g, -0.1)
        if step % 4 == 0:
            outer = combined(slow, p, -1.0)
            buffer = combined(outer, buffer, 0.9)
            slow = combined(slow, combined(outer, buffer, 0.9), -0.7)
            p = slow
    return p


def logits_at(step: int, rows: int) -> list[float]:
    """Return the largest logit of each row's head at a step. A head has two rows."""
    return [30.0 * abs(math.sin(1.0 + step + row // 2)) for row in range(rows)]


def qk_clipped(p: Matrix, grads: list[Matrix]) -> Matrix:
    """Follow algorithm 1 of Kimi Team 2025 for one projection: tau 20, descent by 0.1."""
    for step, g in enumerate(grads, start=1):
        p = combined(p, g, -0.1)
        gammas = [min(1.0, 20.0 / logit) for logit in logits_at(step, len(p))]
        p = [times([row], math.sqrt(a))[0] for row, a in zip(p, gammas, strict=True)]
    return p
