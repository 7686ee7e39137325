"""Annealed Gaussian gradient noise: Neelakantan et al. 2015, equation 1.

    g = g + z * sqrt(eta / t^gamma)              z ~ N(0, 1) for each element

t counts steps from 1, which is the paper's 1 + t. The paper tries eta in {0.01, 0.3, 1} and sets
gamma = 0.55.

z is a pure function of the seed, the step, the index of the element in its tensor, and a key of the
tensor. It uses no generator, so every rank, every executor and every resumed run gets the same
noise. The key is a hash of the values at ``init``, so that two parameters get different noise:

    h(x) = hash of a 32-bit word:  x ^= x >> 16, x *= M1, x ^= x >> 12, x *= M2, x ^= x >> 15
    w = h(index + h(key + salt))                                  (salt: of the step and the seed)
    z = sqrt(-2 * log((w + 1/2) / 2^32)) * cos(2 * pi * h(w + 1) / 2^32)     (Box & Muller 1958)
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.bounds import FINITE_NON_NEGATIVE, Interval
from functional_optim.core.dtensors import (
    is_dtensor,
    shard_like,
    sum_over_ranks,
    to_local,
    unshard_like,
)
from functional_optim.core.hyper import Scalar
from functional_optim.core.recording import is_recorded, record_call
from functional_optim.core.stage import Link, Transform
from functional_optim.numeric import add, shift


class AddNoiseState(NamedTuple):
    key: Tensor  # of the tensor: shape (), int64, below 2^32


class AddNoiseHyper(NamedTuple):
    eta: float  # variance at the first step
    gamma: float  # decay of the variance
    seed: int


class AddNoiseCoefficients(NamedTuple):
    deviation: float  # sqrt(eta / t^gamma)
    salt: float  # from step and seed: a whole number below 2^24, so it is exact in float32


def hash_words(words: Tensor) -> Tensor:
    """Return a hash of each 32-bit word. Words are int64, and all products are below 2^62."""
    words = words & 0xFFFFFFFF
    words = ((words ^ (words >> 16)) * 0x2C1B3C6D) & 0xFFFFFFFF
    words = ((words ^ (words >> 12)) * 0x297A2D39) & 0xFFFFFFFF
    return words ^ (words >> 15)


def indices_of(tensor: Tensor) -> Tensor:
    """Return the row-major index of each element; for a DTensor, of each element of its shard."""
    if not torch.jit.is_scripting():  # noqa: SIM102  TorchScript skips this condition alone
        if is_recorded(tensor):
            found: Tensor = record_call(indices_of, tensor)
            return found
    every = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape)
    return shard_like(every, tensor)


def add_noise_init(param: Tensor, hyper: AddNoiseHyper) -> AddNoiseState:
    bits = to_local(param.detach()).to(torch.float32).view(torch.int32).to(torch.int64)
    total = hash_words(bits + hash_words(indices_of(param))).sum()
    if is_dtensor(param):
        total = sum_over_ranks(total, param)
    return AddNoiseState(hash_words(total + param.numel()))


def add_noise_coefficients(step: float, hyper: AddNoiseHyper) -> AddNoiseCoefficients:
    deviation = hyper.eta**0.5 / step ** (hyper.gamma / 2)
    # An odd factor, so that the sequence of salts has the period 2^24.
    first = float((hyper.seed * 7368787 + 1013904223) % 16777216)
    return AddNoiseCoefficients(deviation, (step * 10368889.0 + first) % 16777216.0)


def add_noise_transform(
    grad: Tensor, param: Tensor, state: AddNoiseState, c: AddNoiseCoefficients
) -> tuple[Tensor, AddNoiseState]:
    salted = shift(state.key.to(torch.float64), c.salt).to(torch.int64)
    words = hash_words(indices_of(grad) + hash_words(salted))
    radius = (-2.0 * ((words.to(torch.float64) + 0.5) / 4294967296.0).log()).sqrt()
    angle = hash_words(words + 1).to(torch.float64) * (2.0 * math.pi / 4294967296.0)
    noise = unshard_like((radius * angle.cos()).to(grad.dtype), grad)
    return add(grad, noise, c.deviation), state


ADD_NOISE = Transform(
    name="add_noise",
    hyper=AddNoiseHyper,
    state=AddNoiseState,
    init=add_noise_init,
    state_depends_on=(),
    coefficients=add_noise_coefficients,
    transform=add_noise_transform,
    bounds=(
        ("eta", FINITE_NON_NEGATIVE),
        ("gamma", FINITE_NON_NEGATIVE),
        ("seed", Interval(0, 2**24 - 1)),
    ),
    kind="per_matrix",
    takes_dtensors=True,
)


def add_noise(eta: Scalar = 0.3, gamma: Scalar = 0.55, seed: int = 0) -> Link:
    """Add Gaussian noise to the gradient, with a variance that decays with the step.

    ``g = g + z * sqrt(eta / step**gamma)`` with ``z ~ N(0, 1)``, where ``step`` counts from 1.

    The noise uses no random generator. ``z`` is a hash of the seed, the step, the index of the
    element, and a key that ``init`` computes from the values of the tensor. So all ranks and all
    executors add the same noise, and a resumed run continues with the same noise. Two parameters
    with the same shape and the same values at ``init`` get the same noise, and the noise repeats
    after 2^24 steps. The hash has 32 bits, so that ``abs(z)`` is below 6.8.

    Cost: about 40 element-wise operations in 64 bits; the state holds 8 bytes per tensor.

    Args:
        eta: variance at the first step, a finite number >= 0. The paper chooses among 0.01, 0.3
            and 1.
        gamma: decay of the variance, a finite number >= 0. The default is the paper's.
        seed: selects the noise, a whole number from 0 to 2^24 - 1.

    Returns:
        A link for :func:`~functional_optim.chain`. Put it before a rule. It needs whole leaves
        (``kind="per_matrix"``), since it uses the indices of their elements.

    Raises:
        TypeError, ValueError: a value outside the bounds above.

    Example::

        >>> import torch
        >>> from functional_optim import chain, descend
        >>> optimizer = chain(add_noise(eta=1.0), descend(lr=1.0))
        >>> params = torch.zeros(10_000)
        >>> noise, _ = optimizer.update(params, torch.zeros(10_000), optimizer.init(params))
        >>> print(f"{noise.std():.1f}")
        1.0

    Reference:
        Neelakantan, Vilnis, Le et al., "Adding gradient noise improves learning for very deep
        networks", 2015 (arXiv 1511.06807), equation 1.
    """
    return ADD_NOISE(eta=eta, gamma=gamma, seed=seed)
