"""Formulas of adaptive algorithms in plain Python numbers, written from their papers.

Each function takes one element of a parameter, its gradients of all steps, and hyper-parameters. It
returns the element after the last step, and that element of the first tensor of the state.
``run_formula`` takes all elements of a parameter.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from functional_optim import Optimizer, algorithms

Values = list[float]
Hyper = dict[str, Any]
Formula = Callable[[float, Values, Hyper], tuple[float, float]]


def ademamix_formula(p: float, grads: Values, c: Hyper) -> tuple[float, float]:
    """Follow algorithm 1 of Pagliardini et al. 2024, with the schedules of equations 4 and 5."""
    b1, b2, b3 = c["betas"]
    fast = slow = v = 0.0
    for t, g in enumerate(grads, 1):
        alpha, b3_now = c["alpha"], b3
        if c["alpha_warmup"]:
            alpha = min(t * c["alpha"] / c["alpha_warmup"], c["alpha"])
        if c["beta3_warmup"]:
            share = t / c["beta3_warmup"]
            ends = math.log(b1) * math.log(b3)
            between = (1 - share) * math.log(b3) + share * math.log(b1)
            b3_now = min(math.exp(ends / between), b3) if share < 1 else b3
        fast = b1 * fast + (1 - b1) * g
        slow = b3_now * slow + (1 - b3_now) * g
        v = b2 * v + (1 - b2) * g * g
        direction = fast / (1 - b1**t) + alpha * slow
        root = math.sqrt(v / (1 - b2**t)) + c["eps"]
        p = p - c["lr"] * (direction / root + c["weight_decay"] * p)
    return p, fast


def adopt_formula(p: float, grads: Values, c: Hyper) -> tuple[float, float]:
    """Follow algorithm 2 of Taniguchi et al. 2024, where the first gradient is g_0."""
    b1, b2 = c["betas"]
    m = v = 0.0
    for t, given in enumerate(grads):
        g = given if c["decouple"] else given + c["weight_decay"] * p
        if t == 0:
            v = g * g
            continue
        n = g / max(math.sqrt(v), c["eps"])
        if c["clip"]:
            n = max(-(t ** c["clip_power"]), min(t ** c["clip_power"], n))
        m = b1 * m + (1 - b1) * n
        if c["decouple"]:
            p = p - c["lr"] * c["weight_decay"] * p
        p = p - c["lr"] * m
        v = b2 * v + (1 - b2) * g * g
    return p, m


def adan_formula(p: float, grads: Values, c: Hyper) -> tuple[float, float]:
    """Follow algorithm 1 of Xie et al. 2022, with bias correction.

    The betas of the paper are 1 minus ours.
    """
    b1, b2, b3 = (1 - one for one in c["betas"])
    m = v = n = 0.0
    before = grads[0]
    for t, g in enumerate(grads, 1):
        m = (1 - b1) * m + b1 * g
        v = (1 - b2) * v + b2 * (g - before)
        n = (1 - b3) * n + b3 * (g + (1 - b2) * (g - before)) ** 2
        m_hat, v_hat = m / (1 - (1 - b1) ** t), v / (1 - (1 - b2) ** t)
        rate = c["lr"] / (math.sqrt(n / (1 - (1 - b3) ** t)) + c["eps"])
        if c["no_prox"]:
            p = p - c["lr"] * c["weight_decay"] * p
        p = p - rate * (m_hat + (1 - b2) * v_hat)
        if not c["no_prox"]:
            p = p / (1 + c["lr"] * c["weight_decay"])
        before = g
    return p, m


def adabelief_formula(p: float, grads: Values, c: Hyper) -> tuple[float, float]:
    """Follow algorithm 2 of Zhuang et al. 2020."""
    b1, b2 = c["betas"]
    m = s = largest = 0.0
    for t, given in enumerate(grads, 1):
        g = given
        if c["decoupled_weight_decay"]:
            p = p - c["lr"] * c["weight_decay"] * p
        else:
            g = given + c["weight_decay"] * p
        m = b1 * m + (1 - b1) * g
        s = b2 * s + (1 - b2) * (g - m) ** 2 + c["eps"]
        largest = max(largest, s) if c["amsgrad"] else s
        root = math.sqrt(largest / (1 - b2**t)) + c["eps"]
        p = p - c["lr"] * (m / (1 - b1**t)) / root
    return p, m


def yogi_formula(p: float, grads: Values, c: Hyper) -> tuple[float, float]:
    """Follow algorithm 2 of Zaheer et al. 2018, with Adam's bias correction or without."""
    b1, b2 = c["betas"]
    m, v = 0.0, c["initial_accumulator_value"]
    for t, given in enumerate(grads, 1):
        g = given + c["weight_decay"] * p
        m = b1 * m + (1 - b1) * g
        if v > g * g:
            v = v - (1 - b2) * g * g
        elif v < g * g:
            v = v + (1 - b2) * g * g
        m_hat, v_hat = m, v
        if c["bias_correction"]:
            m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        p = p - c["lr"] * m_hat / (math.sqrt(v_hat) + c["eps"])
    return p, m


def laprop_formula(p: float, grads: Values, c: Hyper) -> tuple[float, float]:
    """Follow algorithm 1 of Ziyin et al. 2020, with decoupled decay."""
    b1, b2 = c["betas"]
    m = v = 0.0
    for t, g in enumerate(grads, 1):
        v = b2 * v + (1 - b2) * g * g
        m = b1 * m + (1 - b1) * g / (math.sqrt(v / (1 - b2**t)) + c["eps"])
        p = p - c["lr"] * c["weight_decay"] * p
        p = p - c["lr"] * m / (1 - b1**t)
    return p, m


def qhadam_formula(p: float, grads: Values, c: Hyper) -> tuple[float, float]:
    """Follow section 4.3 of Ma & Yarats 2019."""
    (b1, b2), (nu1, nu2) = c["betas"], c["nus"]
    m = v = 0.0
    for t, given in enumerate(grads, 1):
        g = given
        if c["decoupled_weight_decay"]:
            p = p - c["lr"] * c["weight_decay"] * p
        else:
            g = given + c["weight_decay"] * p
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        a = (1 - nu1) * g + nu1 * m / (1 - b1**t)
        s = (1 - nu2) * g * g + nu2 * v / (1 - b2**t)
        p = p - c["lr"] * a / (math.sqrt(s) + c["eps"])
    return p, m


def adabound_formula(p: float, grads: Values, c: Hyper) -> tuple[float, float]:
    """Follow algorithms 2 and 3 of Luo et al. 2019.

    All programs add bias correction and eps, so the formula has both.
    """
    b1, b2 = c["betas"]
    m = v = largest = 0.0
    for t, given in enumerate(grads, 1):
        g = given + c["weight_decay"] * p
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        largest = max(largest, v) if c["amsbound"] else v
        low = c["final_lr"] * (1 - 1 / (c["gamma"] * t + 1))
        high = c["final_lr"] * (1 + 1 / (c["gamma"] * t))
        rate = c["lr"] * math.sqrt(1 - b2**t) / (1 - b1**t) / (math.sqrt(largest) + c["eps"])
        p = p - max(low, min(high, rate)) * m
    return p, m


def stable_adamw_formula(p: Values, grads: list[Values], c: Hyper) -> tuple[Values, Values]:
    """Follow algorithm 2 of Wortsman et al. 2023, with its betas that depend on the step."""
    b1, b2 = c["betas"]
    m, v = [0.0] * len(p), [0.0] * len(p)
    for t, g in enumerate(grads, 1):
        now1 = b1 * (1 - b1 ** (t - 1)) / (1 - b1**t)
        now2 = b2 * (1 - b2 ** (t - 1)) / (1 - b2**t)
        m = [now1 * a + (1 - now1) * b for a, b in zip(m, g, strict=True)]
        v = [now2 * a + (1 - now2) * b * b for a, b in zip(v, g, strict=True)]
        ratios = [b * b / max(a, c["eps"] ** 2) for a, b in zip(v, g, strict=True)]
        rate = c["lr"] / max(1.0, math.sqrt(math.fsum(ratios) / len(ratios)))
        p = [
            x - rate * c["weight_decay"] * x - rate * a / (math.sqrt(b) + c["eps"])
            for x, a, b in zip(p, m, v, strict=True)
        ]
    return p, m


FORMULAS: dict[str, Formula] = {
    "ademamix": ademamix_formula,
    "adopt": adopt_formula,
    "adan": adan_formula,
    "adabelief": adabelief_formula,
    "yogi": yogi_formula,
    "laprop": laprop_formula,
    "qhadam": qhadam_formula,
    "adabound": adabound_formula,
}
"""Formulas of one element, by the name of the algorithm."""

OPTIONS: dict[str, dict[str, list[Any]]] = {
    "ademamix": {
        "lr": [0.1],
        "weight_decay": [0.01, 0.0, 0.3],
        "betas": [(0.9, 0.99, 0.999), (0.5, 0.0, 0.9)],
        "alpha": [2.0, 0.0, 5.0],
        "alpha_warmup": [3, 0, 7, 100],
        "beta3_warmup": [4, 0, 7, 100],
        "eps": [1e-8, 0.01],
    },
    "adopt": {
        "lr": [0.1],
        "weight_decay": [0.01, 0.0, 0.3],
        "betas": [(0.9, 0.99), (0.0, 0.5)],
        "eps": [1e-6, 0.5],
        "decouple": [True, False],
        "clip": [True, False],
        "clip_power": [0.25, 0.0],
    },
    "adan": {
        "lr": [0.1],
        "weight_decay": [0.01, 0.0, 0.3],
        "betas": [(0.98, 0.92, 0.99), (0.5, 0.0, 0.9)],
        "eps": [1e-8, 0.01],
        "no_prox": [False, True],
    },
    "adabelief": {
        "lr": [0.1],
        "weight_decay": [0.01, 0.0, 0.3],
        "betas": [(0.9, 0.99), (0.5, 0.0)],
        "eps": [1e-8, 1e-16, 0.01],
        "amsgrad": [False, True],
        "decoupled_weight_decay": [True, False],
    },
    "yogi": {
        "lr": [0.1],
        "weight_decay": [0.01, 0.0, 0.3],
        "betas": [(0.9, 0.99), (0.0, 0.5)],
        "eps": [0.001, 0.5],
        "initial_accumulator_value": [1e-6, 2.0],
        "bias_correction": [True, False],
    },
    "laprop": {
        "lr": [0.1],
        "weight_decay": [0.01, 0.0, 0.3],
        "betas": [(0.9, 0.99), (0.0, 0.5)],
        "eps": [1e-15, 0.5],
    },
    "stable_adamw": {
        "lr": [0.1],
        "weight_decay": [0.01, 0.0, 0.3],
        "betas": [(0.9, 0.99), (0.0, 0.5)],
        "eps": [1e-6, 0.5],
    },
    "qhadam": {
        "lr": [0.1],
        "weight_decay": [0.01, 0.0, 0.3],
        "betas": [(0.9, 0.99), (0.0, 0.5)],
        "nus": [(0.7, 0.9), (0.7, 1.0), (0.0, 0.5), (1.0, 0.0)],
        "eps": [1e-8, 0.5],
        "decoupled_weight_decay": [False, True],
    },
    "adabound": {
        "lr": [0.1],
        "weight_decay": [0.01, 0.0, 0.3],
        "betas": [(0.9, 0.99), (0.0, 0.5)],
        "final_lr": [0.1, 0.05, 2.0],
        "gamma": [0.01, 0.001, 0.5],
        "eps": [1e-8, 0.5],
        "amsbound": [False, True],
    },
}
"""Options to compare with. The table of agreement has the first of each."""


def run_formula(name: str, p: Values, grads: list[Values], c: Hyper) -> tuple[Values, Values]:
    """Run the formula of an algorithm on a parameter with several elements."""
    if name == "stable_adamw":
        return stable_adamw_formula(p, grads, c)
    ends = [FORMULAS[name](one, list(own), c) for one, *own in zip(p, *grads, strict=True)]
    return [end[0] for end in ends], [end[1] for end in ends]


def _entry(name: str) -> tuple[Callable[[], Optimizer], Callable[..., tuple[Values, Values]]]:
    options = {key: values[0] for key, values in OPTIONS[name].items()}
    return partial(getattr(algorithms, name), **options), partial(run_formula, name, c=options)


ADAPTIVE_FORMULAS = {name: _entry(name) for name in OPTIONS}
"""Constructors and formulas, for the table of agreement."""
