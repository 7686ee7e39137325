"""Formulas of algorithms that torch.optim does not have, in plain Python numbers.

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


def qhm_formula(p: Values, grads: list[Values], **c: Any) -> Result:
    """Follow equations 3 and 4 of Ma & Yarats 2019."""
    lr, beta, nu, decay, buffer = c["lr"], c["momentum"], c["nu"], c["weight_decay"], [0.0] * len(p)
    for given in grads:
        g = _signed(given, c)
        if c.get("weight_decay_type") == "direct":
            p = [x - lr * decay * x for x in p]
        else:
            g = [a + decay * x for a, x in zip(g, p, strict=True)]
        buffer = [beta * b + (1 - beta) * a for a, b in zip(g, buffer, strict=True)]
        p = [x - lr * ((1 - nu) * a + nu * b) for x, a, b in zip(p, g, buffer, strict=True)]
    return p, buffer


def lion_formula(p: Values, grads: list[Values], **c: Any) -> Result:
    """Follow algorithm 2 of Chen et al. 2023: both averages are of the old momentum."""
    (b1, b2), m = c["betas"], [0.0] * len(p)
    for given in grads:
        g = _signed(given, c)
        ahead = [b1 * b + (1 - b1) * a for a, b in zip(g, m, strict=True)]
        sign = [math.copysign(1.0, one) if one else 0.0 for one in ahead]
        p = [x - c["lr"] * (s + c["weight_decay"] * x) for x, s in zip(p, sign, strict=True)]
        m = [b2 * b + (1 - b2) * a for a, b in zip(g, m, strict=True)]
    return p, m


def lamb_formula(p: Values, grads: list[Values], **c: Any) -> Result:
    """Follow algorithm 2 of You et al. 2020."""
    (b1, b2), m, v = c["betas"], [0.0] * len(p), [0.0] * len(p)
    for t, given in enumerate(grads, start=1):
        g = _signed(given, c)
        m = [b1 * b + (1 - b1) * a for a, b in zip(g, m, strict=True)]
        v = [b2 * b + (1 - b2) * a * a for a, b in zip(g, v, strict=True)]
        roots = [math.sqrt(b / (1 - b2**t)) + c["eps"] for b in v]
        d = [a / (1 - b1**t) / b for a, b in zip(m, roots, strict=True)]
        d = [a + c["weight_decay"] * x for a, x in zip(d, p, strict=True)]
        ratio = min(max(math.hypot(*p), c["min_norm"]) / math.hypot(*d), c["max_ratio"])
        p = [x - c["lr"] * ratio * a for x, a in zip(p, d, strict=True)]
    return p, m


def lars_formula(p: Values, grads: list[Values], **c: Any) -> Result:
    """Follow algorithm 1 of You et al. 2017, with the norm of the sum of gradient and decay."""
    b = [0.0] * len(p)
    for given in grads:
        g = _signed(given, c)
        d = [a + c["weight_decay"] * x for a, x in zip(g, p, strict=True)]
        ratio = c["trust_coefficient"] * math.hypot(*p) / math.hypot(*d)
        d = [ratio * a for a in d]
        b = [c["momentum"] * before + a for before, a in zip(b, d, strict=True)]
        ahead = [a + c["momentum"] * now for a, now in zip(d, b, strict=True)]
        p = [x - c["lr"] * a for x, a in zip(p, ahead if c.get("nesterov") else b, strict=True)]
    return p, b


def rowwise_adagrad_formula(p: Values, grads: list[Values], *, width: int = 1, **c: Any) -> Result:
    """Follow FBGEMM's EXACT_ROWWISE_ADAGRAD, with rows of a width."""
    momentum = [0.0] * (len(p) // width)
    for given in grads:
        g = [a + c["weight_decay"] * x for a, x in zip(given, p, strict=True)]
        rows = [g[k : k + width] for k in range(0, len(g), width)]
        squares = [sum(a * a for a in row) / width for row in rows]
        momentum = [b + a for a, b in zip(squares, momentum, strict=True)]
        rates = [c["lr"] / (math.sqrt(one) + c["eps"]) for one in momentum for _ in range(width)]
        p = [x - rate * a for x, a, rate in zip(p, g, rates, strict=True)]
    return p, momentum


def ftrl_formula(p: Values, grads: list[Values], **c: Any) -> Result:
    """Follow algorithm 1 of McMahan et al. 2013. The state has ``lr * z``."""
    ends = [_ftrl(*one, c=c) for one in zip(p, *grads, strict=True)]
    return [p for p, _ in ends], [c["lr"] * z for _, z in ends]


def _ftrl(w: float, *grads: float, c: dict[str, Any]) -> tuple[float, float]:
    z = n = 0.0
    for g in grads:
        if g:  # the algorithm looks at features that are not 0
            sigma = (math.sqrt(n + g * g) - math.sqrt(n)) / c["lr"]
            z, n = z + g - sigma * w, n + g * g
            beyond = z - math.copysign(min(abs(z), c["l1"]), z)
            w = -beyond / ((c["beta"] + math.sqrt(n)) / c["lr"] + c["l2"])
    return w, z


def _signed(grad: Values, c: dict[str, Any]) -> Values:
    return [-one for one in grad] if c.get("maximize") else grad


FORMULAS: dict[str, Callable[..., Result]] = {
    "qhm": qhm_formula,
    "lion": lion_formula,
    "lamb": lamb_formula,
    "lars": lars_formula,
    "rowwise_adagrad": rowwise_adagrad_formula,
    "ftrl": ftrl_formula,
}
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "qhm": {
        "lr": [0.1],
        "momentum": [0.9, 0.0, 0.5, 0.999],
        "nu": [0.7, 0.0, 0.3, 1.0, 1.5],
        "weight_decay": [0.01, 0.0, 0.3],
        "weight_decay_type": ["grad", "direct"],
        "maximize": [False, True],
    },
    "lion": {
        "lr": [0.1],
        "betas": [(0.9, 0.99), (0.0, 0.5), (0.95, 0.0), (0.6, 0.2)],
        "weight_decay": [0.01, 0.0, 0.3],
        "maximize": [False, True],
    },
    "lamb": {
        "lr": [0.1],
        "betas": [(0.9, 0.999), (0.0, 0.5), (0.7, 0.0)],
        "eps": [1e-6],
        "weight_decay": [0.01, 0.0, 0.3],
        "min_norm": [0.0, 5.0],
        "max_ratio": [math.inf, 0.2],
        "maximize": [False, True],
    },
    "lars": {
        "lr": [0.1],
        "momentum": [0.9],
        "weight_decay": [0.01, 0.0, 0.3],
        "trust_coefficient": [0.5, 2.0],
        "maximize": [False, True],
        "nesterov": [False, True],
    },
    "rowwise_adagrad": {
        "lr": [0.1],
        "eps": [1e-8, 0.1],
        "weight_decay": [0.01, 0.0, 0.2],
    },
    "ftrl": {
        "lr": [0.1, 2.0],
        "beta": [1.0, 0.0],
        "l1": [0.1, 0.0, 4.0],
        "l2": [0.01, 0.0, 0.4],
    },
}
"""Options to compare with. The table of agreement has the first of each."""


def _entry(name: str) -> tuple[Callable[[], Optimizer], Callable[..., Result]]:
    hyper = {key: values[0] for key, values in OPTIONS[name].items()}
    return partial(getattr(algorithms, name), **hyper), partial(FORMULAS[name], **hyper)


FIRST_FORMULAS = {name: _entry(name) for name in OPTIONS}
"""Constructors and formulas, for the table of agreement."""
