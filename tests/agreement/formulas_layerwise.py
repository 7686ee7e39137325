"""Formulas from papers in plain Python numbers, independent of the package.

Each function takes the first parameter, a flat list, and one flat list of gradients per step. It
returns the last parameter and one field of the state.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from functional_optim import Optimizer, algorithms

Values = list[float]
Result = tuple[Values, Values]


def sign(x: float) -> float:
    return float((x > 0) - (x < 0))


def norm(values: Values) -> float:
    return math.sqrt(math.fsum(x * x for x in values))


def sign_sgd_formula(p: Values, grads: list[Values], *, lr: float, weight_decay: float) -> Result:
    """Follow algorithm 1 of Bernstein et al. 2018.

    There is no state, so the parameter is returned in its place.
    """
    for g in grads:
        p = [x - lr * (sign(a) + weight_decay * x) for x, a in zip(p, g, strict=True)]
    return p, p


def signum_formula(
    p: Values, grads: list[Values], *, lr: float, momentum: float, weight_decay: float
) -> Result:
    """Follow algorithm 2 of Bernstein et al. 2018."""
    m = [0.0] * len(p)
    for g in grads:
        m = [momentum * b + (1 - momentum) * a for a, b in zip(g, m, strict=True)]
        p = [x - lr * (sign(a) + weight_decay * x) for x, a in zip(p, m, strict=True)]
    return p, m


def novograd_formula(p: Values, grads: list[Values], **hyper: Any) -> Result:
    """Follow algorithm 1 of Ginsburg et al. 2019, with its special first step."""
    lr, (b1, b2), eps = hyper["lr"], hyper["betas"], hyper["eps"]
    decay, gain = hyper["weight_decay"], 1.0
    if hyper.get("grad_averaging"):
        gain = 1 - b1
    m, v = [0.0] * len(p), 0.0
    for t, g in enumerate(grads, start=1):
        square = norm(g) ** 2
        v = square if t == 1 else b2 * v + (1 - b2) * square
        d = [a / (math.sqrt(v) + eps) + decay * x for a, x in zip(g, p, strict=True)]
        before = 0.0 if t == 1 else b1
        m = [before * b + gain * a for a, b in zip(d, m, strict=True)]
        p = [x - lr * a for x, a in zip(p, m, strict=True)]
    return p, m


def came_formula(
    p: Values, grads: list[Values], *, columns: int, **hyper: Any
) -> tuple[Values, Values]:
    """Follow algorithm 2 of Luo et al. 2023 for a matrix, with sums as in the paper."""
    lr, (b1, b2, b3), (e1, e2) = hyper["lr"], hyper["betas"], hyper["eps"]
    n, k, size = len(p) // columns, columns, len(p)
    r, c, big_r, big_c = [0.0] * n, [0.0] * k, [0.0] * n, [0.0] * k
    m = [0.0] * size
    for g in grads:
        r, c = _factors(r, c, [a * a + e1 for a in g], b2)
        u = [a / math.sqrt(b) for a, b in zip(g, _product(r, c), strict=True)]
        rms = norm(u) / math.sqrt(size)
        u = [a / max(1.0, rms / hyper["clip_threshold"]) for a in u]
        m = [b1 * b + (1 - b1) * a for a, b in zip(u, m, strict=True)]
        unstable = [(a - b) ** 2 + e2 for a, b in zip(u, m, strict=True)]
        big_r, big_c = _factors(big_r, big_c, unstable, b3)
        p = [x - lr * hyper["weight_decay"] * x for x in p]
        s = _product(big_r, big_c)
        p = [x - lr * a / math.sqrt(b) for x, a, b in zip(p, m, s, strict=True)]
    return p, m


def _factors(r: Values, c: Values, square: Values, beta: float) -> tuple[Values, Values]:
    n, k = len(r), len(c)
    rows = [math.fsum(square[i * k : (i + 1) * k]) for i in range(n)]
    columns = [math.fsum(square[j::k]) for j in range(k)]
    new_r = [beta * a + (1 - beta) * b for a, b in zip(r, rows, strict=True)]
    return new_r, [beta * a + (1 - beta) * b for a, b in zip(c, columns, strict=True)]


def _product(r: Values, c: Values) -> Values:
    total = math.fsum(r)
    return [a * b / total for a in r for b in c]


def adam_mini_formula(p: Values, grads: list[Values], *, blocks: int, **hyper: Any) -> Result:
    """Follow algorithm 1 of Zhang et al. 2024, with equal blocks of consecutive elements."""
    lr, (b1, b2), size = hyper["lr"], hyper["betas"], len(p) // blocks
    m, v = [0.0] * len(p), [0.0] * blocks
    for t, g in enumerate(grads, start=1):
        m = [b1 * b + (1 - b1) * a for a, b in zip(g, m, strict=True)]
        means = [norm(g[i * size : (i + 1) * size]) ** 2 / size for i in range(blocks)]
        v = [b2 * b + (1 - b2) * a for a, b in zip(means, v, strict=True)]
        roots = [math.sqrt(b / (1 - b2**t)) + hyper["eps"] for b in v]
        p = [x - lr * hyper["weight_decay"] * x for x in p]
        own = [roots[i // size] for i in range(len(p))]
        p = [x - lr * a / (1 - b1**t) / b for x, a, b in zip(p, m, own, strict=True)]
    return p, m


def dog_formula(p: Values, grads: list[Values], **hyper: Any) -> Result:
    """Follow the DoG formula of Ivgi et al. 2023. L-DoG is the same for one tensor."""
    start, total = list(p), 0.0
    distance = hyper["reps_rel"] * (1 + norm(p))
    for grad in grads:
        g = [a + hyper["weight_decay"] * x for a, x in zip(grad, p, strict=True)]
        distance = max(distance, norm([x - y for x, y in zip(p, start, strict=True)]))
        total += norm(g) ** 2
        eta = hyper["lr"] * distance / math.sqrt(total + hyper["eps"])
        p = [x - eta * a for x, a in zip(p, g, strict=True)]
    return p, start


def dadapt_sgd_formula(p: Values, grads: list[Values], **hyper: Any) -> Result:
    """Follow algorithm 4 of Defazio & Mishchenko 2023, with z stored as in the paper."""
    d, r, first, momentum = hyper["d0"], 0.0, 0.0, hyper["momentum"]
    s, z = [0.0] * len(p), list(p)
    for grad in grads:
        g = [a + hyper["weight_decay"] * x for a, x in zip(grad, p, strict=True)]
        first = first or norm(g)
        length = d * hyper["lr"] / first
        r += length * math.fsum(a * b for a, b in zip(g, s, strict=True))
        s = [b + length * a for a, b in zip(g, s, strict=True)]
        z = [b - length * a for a, b in zip(g, z, strict=True)]
        p = [momentum * x + (1 - momentum) * a for x, a in zip(p, z, strict=True)]
        d = max(d, min(2 * r / norm(s), d * hyper["growth_rate"]))
    return p, s


def dadapt_adam_formula(p: Values, grads: list[Values], **hyper: Any) -> Result:
    """Follow algorithm 5 of Defazio & Mishchenko 2023. The update of r uses the previous v."""
    (b1, b2), d, r = hyper["betas"], hyper["d0"], 0.0
    b, decay = math.sqrt(b2), hyper["weight_decay"]
    s, m, v = ([0.0] * len(p) for _ in range(3))
    for n, grad in enumerate(grads, start=1):
        added = 0.0 if hyper["decouple"] else decay
        g = [a + added * x for a, x in zip(grad, p, strict=True)]
        length = d * hyper["lr"]
        if hyper["use_bias_correction"]:
            length *= math.sqrt(1 - b2**n) / (1 - b1**n)
        roots = [math.sqrt(x) + hyper["eps"] for x in v]
        gain = math.fsum(a * x / y for a, x, y in zip(g, s, roots, strict=True))
        r = b * r + (1 - b) * length * gain
        s = [b * x + (1 - b) * length * a for a, x in zip(g, s, strict=True)]
        m = [b1 * x + (1 - b1) * length * a for a, x in zip(g, m, strict=True)]
        v = [b2 * x + (1 - b2) * a * a for a, x in zip(g, v, strict=True)]
        estimate = r / ((1 - b) * math.fsum(map(abs, s)))
        d = max(d, min(estimate, d * hyper["growth_rate"]))
        if hyper["decouple"]:
            p = [x - length * decay * x for x in p]
        p = [x - a / (math.sqrt(y) + hyper["eps"]) for x, a, y in zip(p, m, v, strict=True)]
    return p, s


OPTIONS: dict[str, dict[str, list[Any]]] = {
    "sign_sgd": {
        "lr": [0.1],
        "weight_decay": [0.01, 0, 0.1],
    },
    "signum": {
        "lr": [0.1],
        "momentum": [0.9, 0.0],
        "weight_decay": [0.01, 0.0, 0.1],
    },
    "novograd": {
        "lr": [0.1],
        "betas": [(0.9, 0.99), (0.95, 0.98), (0.0, 0.5)],
        "eps": [1e-8, 0.1],
        "weight_decay": [0.01, 0.0, 0.1],
        "grad_averaging": [False, True],
    },
    "came": {
        "lr": [0.01],
        "betas": [(0.9, 0.999, 0.9999), (0.5, 0.9, 0.8)],
        "eps": [(1e-30, 1e-16), (0.01, 0.1)],
        "clip_threshold": [1.0, 0.3],
        "weight_decay": [0.01, 0.0, 0.1],
    },
    "adam_mini": {
        "lr": [0.1],
        "betas": [(0.9, 0.99), (0.9, 0.95), (0.0, 0.5)],
        "eps": [1e-8, 0.1],
        "weight_decay": [0.01, 0.0, 0.1],
    },
    "dog": {
        "lr": [1.0, 0.5],
        "reps_rel": [0.1, 1e-6],
        "eps": [1e-8, 0.1],
        "weight_decay": [0.01, 0.0, 0.1],
    },
    "dadapt_sgd": {
        "lr": [1.0, 0.5],
        "momentum": [0.9, 0.0],
        "weight_decay": [0.01, 0.0, 0.1],
        "d0": [0.1, 1e-6],
        "growth_rate": [math.inf, 1.3],
    },
    "dadapt_adam": {
        "lr": [1.0, 0.5],
        "betas": [(0.9, 0.99), (0.9, 0.999), (0.0, 0.5)],
        "eps": [1e-8, 0.1],
        "weight_decay": [0.01, 0.0, 0.1],
        "decouple": [True, False],
        "use_bias_correction": [False, True],
        "d0": [0.1, 1e-6],
        "growth_rate": [math.inf, 1.3],
    },
}
OPTIONS["ldog"] = OPTIONS["dog"]
"""Options to compare with. The table of agreement has the first of each."""

MATRICES = {"came": {"columns": 100}, "adam_mini": {"blocks": 5}}
"""Algorithms that are compared on a 5 x 100 matrix, with that shape as their formulas take it."""

FORMULAS: dict[str, Callable[..., Result]] = {
    "sign_sgd": sign_sgd_formula,
    "signum": signum_formula,
    "novograd": novograd_formula,
    "came": came_formula,
    "adam_mini": adam_mini_formula,
    "dog": dog_formula,
    "ldog": dog_formula,
    "dadapt_sgd": dadapt_sgd_formula,
    "dadapt_adam": dadapt_adam_formula,
}


def _entry(name: str) -> tuple[Callable[[], Optimizer], Callable[..., Result]]:
    hyper = {key: values[0] for key, values in OPTIONS[name].items()}
    build: Callable[[], Optimizer] = partial(getattr(algorithms, name), **hyper)
    return build, partial(FORMULAS[name], **hyper, **MATRICES.get(name, {}))


LAYERWISE_FORMULAS = {name: _entry(name) for name in OPTIONS}
"""Constructors and formulas, for the table of agreement."""
