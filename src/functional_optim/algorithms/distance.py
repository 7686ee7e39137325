"""Common functions of algorithms that estimate d, the distance to the solution, as they go.

Defazio & Mishchenko 2023 (D-Adaptation) and Mishchenko & Defazio 2024 (Prodigy).
"""

import math
from typing import Any

from functional_optim.numeric import larger, smaller


def step_length(
    d: float, lr: float, betas: tuple[float, float], use_bias_correction: bool, number: float
) -> float:
    """Return ``d * lr``, with Adam's correction of bias for the step of a number if asked."""
    beta_1, beta_2 = betas
    length = d * lr
    if not use_bias_correction:
        return length
    correction: float = ((1 - beta_2**number) ** 0.5) / (1 - beta_1**number)
    return length * correction


def limited_growth(d: Any, estimate: Any, growth_rate: Any) -> Any:
    """Return the larger of d and an estimate of at most ``growth_rate * d``."""
    return larger(d, limited(estimate, d, growth_rate))


def limited(estimate: Any, d: Any, growth_rate: Any) -> Any:
    """Return the smaller of an estimate and ``growth_rate * d``."""
    # Infinity times anything that a derivative is taken of would make it NaN.
    is_free = isinstance(growth_rate, float) and math.isinf(growth_rate)
    return estimate if is_free else smaller(estimate, d * growth_rate)
