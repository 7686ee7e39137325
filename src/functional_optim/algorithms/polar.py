"""Approximate polar factors by odd polynomials: the matrices ``U V^T`` of ``U S V^T``.

    X_0 = M / |M|_F
    X_k = a_k * X_{k-1} + (b_k * A + c_k * A A) X_{k-1},   A = X_{k-1} X_{k-1}^T

Each iteration applies the polynomial ``a_k s + b_k s^3 + c_k s^5`` to every singular value ``s``.
The matrix is transposed first if it has more rows than columns, so that ``A`` is small.

Implementations of Muon differ in the polynomials, the dtype, the division by the norm, and the
rounding of the products. Each of these is an argument of :func:`orthogonalize`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.matrices import iteration_flops, norms
from functional_optim.numeric import addmm, clamp, mul, shift

Polynomial = tuple[float, float, float]
"""The coefficients ``(a, b, c)`` of ``a s + b s^3 + c s^5``."""

KELLER: Polynomial = (3.4445, -4.7750, 2.0315)
"""The polynomial of Jordan et al. 2024; it has a steep slope at 0, and no fixed point at 1."""

ITERATION_DTYPES = ("bfloat16", "float16", "float32", "float64", "parameter")
"""Names of the dtypes in which the iteration can run; "parameter" is the dtype of the momentum."""

NORMALIZATIONS = ("clamp", "add", "before_cast")
"""Names of the ways to divide by the norm."""

SCALES = ("original", "keller", "match_rms_adamw", "spectral", "max_side", "unscaled")
"""Names of the factors that depend on the shape of the matrix."""

_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""Amsel et al. 2025, algorithm 1: the best polynomials for singular values in [0.001, 1]."""

_TUNED = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""The coefficients of Jiacheng You for modded-nanogpt."""


@dataclass(frozen=True)
class PolarFactor:
    """A sequence of odd polynomials that approximates the polar factor of a matrix.

    An optimizer that takes a ``polar`` argument applies the polynomials in order. Write your own,
    or take one of the static methods.

    Args:
        polynomials: ``(a, b, c)`` of ``a s + b s^3 + c s^5`` for each iteration.

    Raises:
        ValueError: a polynomial without three finite numbers.

    Example::

        >>> polar = PolarFactor.quintic(2, (2.0, -1.5, 0.5))
        >>> polar.polynomials
        ((2.0, -1.5, 0.5), (2.0, -1.5, 0.5))
        >>> round(polar(0.5), 4)
        0.9991
    """

    polynomials: tuple[Polynomial, ...]

    def __post_init__(self) -> None:
        """Convert the numbers to floats, and check them."""
        polynomials = []
        for one in self.polynomials:
            numbers = tuple(float(number) for number in one)
            if len(numbers) != 3 or not all(map(math.isfinite, numbers)):
                raise ValueError(f"polar: a polynomial must be 3 finite numbers, got {one!r}")
            polynomials.append(numbers)
        object.__setattr__(self, "polynomials", tuple(polynomials))

    def __call__(self, value: float) -> float:
        """Return a singular value after all iterations."""
        for a, b, c in self.polynomials:
            value = a * value + b * value**3 + c * value**5
        return value

    def __str__(self) -> str:
        return "; ".join(" ".join(map(repr, one)) for one in self.polynomials)

    @staticmethod
    def parse(text: str) -> "PolarFactor":
        """Return the PolarFactor of a text that ``str`` returned, as in ``repr`` of an optimizer.

        Args:
            text: ``"a b c; a b c"``.

        Raises:
            ValueError: the text has another form.
        """
        try:
            found = tuple(tuple(map(float, one.split())) for one in text.split(";") if one.strip())
            return PolarFactor(found)  # type: ignore[arg-type]  # it checks the lengths
        except ValueError as error:
            raise ValueError(
                f'polar: polynomials must be a text of the form "a b c; a b c", got {text!r}'
            ) from error

    @staticmethod
    def quintic(steps: int = 5, coefficients: Sequence[float] = KELLER) -> "PolarFactor":
        """Return the same polynomial for each iteration.

        With the default coefficients, five iterations take singular values in [0.01, 1] to
        [0.68, 1.14]. torch.optim.Muon, Keller Jordan's Muon, Moonlight and Scion use it.

        Args:
            steps: number of iterations, from 0 to 99.
            coefficients: ``(a, b, c)``.

        Raises:
            ValueError: a number of iterations outside its bounds.
        """
        if steps not in range(100):
            raise ValueError(f"polar: ns_steps must be a whole number from 0 to 99, got {steps!r}")
        return PolarFactor((tuple(coefficients),) * steps)  # type: ignore[arg-type]

    @staticmethod
    def tuned_quintic() -> "PolarFactor":
        """Return the five polynomials of modded-nanogpt (Jiacheng You, 2025).

        heavyball uses them, and optax and NVIDIA's Emerging-Optimizers, which call them "dion" and
        "quintic".
        """
        return PolarFactor(_TUNED)

    @staticmethod
    def polar_express(steps: int = 5) -> "PolarFactor":
        """Return the Polar Express of Amsel et al. 2025, algorithm 1.

        Each polynomial is the best one for the singular values after the polynomials before it.
        Five iterations take singular values in [0.001, 1] to [0.84, 1.13]; eight, to 1 up to
        rounding. As in the paper, arguments are divided by 1.01, since rounding may make a singular
        value larger than 1. Here the first polynomial also has the factor 1.01 of the norm. A later
        program of the authors computes the polynomials for the divided arguments. Its coefficients
        differ in the second decimal.

        Args:
            steps: number of iterations, from 0 to 99; the last polynomial is repeated.

        Raises:
            ValueError: a number of iterations outside its bounds.
        """
        if steps not in range(100):
            raise ValueError(f"polar: steps must be a whole number from 0 to 99, got {steps!r}")
        last = len(_POLAR_EXPRESS) - 1
        found = []
        for index in range(steps):
            a, b, c = _POLAR_EXPRESS[min(index, last)]
            safety = (1.01 if index < last else 1.0) * (1.01 if index == 0 else 1.0)
            found.append((a / safety, b / safety**3, c / safety**5))
        return PolarFactor(tuple(found))

    @staticmethod
    def cans(steps: int = 10, low: float = 8.5e-4) -> "PolarFactor":
        """Return the cubic Chebyshev-type polynomials of Grishina et al. 2025 (CANS).

        The first polynomial is the best cubic one for singular values in [low, 1]. Each later one
        is the best for the interval that the polynomial before it leaves. An iteration takes two
        products of matrices, and one with a quintic polynomial takes three. Ten iterations take
        [0.00085, 1] to 1 up to 1.5e-5. Use them with ``iteration_dtype="float32"``: the first
        polynomial takes 1 to 0.004, which the rounding of bfloat16 can make negative.

        Args:
            steps: number of iterations, from 0 to 99.
            low: the smallest singular value that is taken to 1, in (0, 1).

        Raises:
            ValueError: an argument outside its bounds.
        """
        if steps not in range(100) or not 0.0 < low < 1.0:
            raise ValueError(
                "polar: cans must have a whole number of steps from 0 to 99 and low in (0, 1), got "
                f"steps={steps!r} and low={low!r}"
            )
        found, high = [], 1.0
        for _ in range(steps):
            square = low * low + low * high + high * high
            peak, ends = 2.0 * (square / 3.0) ** 1.5, low * high * (low + high)
            found.append((2.0 * square / (peak + ends), -2.0 / (peak + ends), 0.0))
            error = max(0.0, (peak - ends) / (peak + ends))
            low, high = 1.0 - error, 1.0 + error
        return PolarFactor(tuple(found))

    @staticmethod
    def deepseek() -> "PolarFactor":
        """Return the 8 + 2 iterations of DeepSeek-V4, algorithm 1.

        Eight iterations of the usual quintic polynomial, then two of ``2 s - 1.5 s^3 + 0.5 s^5``,
        which has its fixed point at 1.
        """
        return PolarFactor((KELLER,) * 8 + ((2.0, -1.5, 0.5),) * 2)


def encode_polar(polar: Any, steps: int = 5, coefficients: Any = KELLER) -> str:
    """Return a polar factor as text, which is hashable and works in TorchScript.

    ``steps`` and ``coefficients`` are those of the quintic polynomial, used if ``polar`` is None.
    """
    if polar is None:
        return str(PolarFactor.quintic(steps, coefficients))
    if isinstance(polar, str):
        return str(PolarFactor.parse(polar))
    return str(polar if isinstance(polar, PolarFactor) else PolarFactor(tuple(polar)))


# ------------------------------------------------------- functions of a step, also in TorchScript


def polynomials_of(text: str | None) -> list[tuple[float, float, float]]:
    """Return the polynomials of a text."""
    found: list[tuple[float, float, float]] = []
    if text is not None:
        for one in text.split(";"):
            if len(one) > 0:
                numbers = [float(number) for number in one.strip().split(" ")]
                found.append((numbers[0], numbers[1], numbers[2]))
    return found


def are_cubic(polynomials: list[tuple[float, float, float]]) -> bool:
    """Return True if no polynomial has a term of degree 5."""
    found = True
    for one in polynomials:
        found = found and one[2] == 0.0
    return found


def polar_flops(rows: int, columns: int, text: str | None) -> int:
    """Return the floating-point operations of all iterations on one matrix."""
    polynomials = polynomials_of(text)
    return len(polynomials) * iteration_flops(rows, columns, are_cubic(polynomials))


def cast(x: Tensor, dtype: str) -> Tensor:
    """Return a tensor in the dtype of this name, or unchanged for "parameter"."""
    if dtype == "bfloat16":
        return x.to(torch.bfloat16)
    if dtype == "float16":
        return x.to(torch.float16)
    if dtype == "float32":
        return x.to(torch.float32)
    if dtype == "float64":
        return x.to(torch.float64)
    return x


def normalize(x: Tensor, eps: float, dtype: str, normalization: str) -> Tensor:
    """Divide each matrix by its Frobenius norm, and convert it to the dtype of the iteration."""
    if normalization == "before_cast":
        return cast(x / clamp(norms(x), eps, math.inf), dtype)
    coarse = cast(x, dtype)
    if normalization == "add":
        return coarse / shift(norms(coarse), eps)
    return coarse / clamp(norms(coarse), eps, math.inf)


def iterate(
    unit: Tensor, polynomials: list[tuple[float, float, float]], cubic: bool, fused: bool
) -> Tensor:
    """Apply the polynomials to the singular values of one matrix, or of several.

    ``cubic``: no polynomial has a term of degree 5, which saves a product. ``fused``: each product
    and its sum are rounded once, as in torch.optim.Muon.
    """
    is_tall = unit.size(-2) > unit.size(-1)
    x = unit.mT if is_tall else unit
    for a, b, c in polynomials:
        gram = x @ x.mT
        if cubic:
            x = addmm(x, gram, x, a, b) if fused else mul(x, a) + mul(gram, b) @ x
        elif fused:
            x = addmm(x, addmm(gram, gram, gram, b, c), x, a, 1.0)
        else:
            x = mul(x, a) + (mul(gram, b) + mul(gram, c) @ gram) @ x
    return x.mT if is_tall else x


def orthogonalize(
    x: Tensor,
    polynomials: list[tuple[float, float, float]],
    cubic: bool,
    eps: float,
    dtype: str,
    normalization: str,
    fused: bool,
) -> Tensor:
    """Approximate the polar factor of one matrix, or of several.

    Matrices are made contiguous first, since rounding of products depends on strides. ``eps`` is
    the least divisor, or is added to the norm. For the other arguments see :func:`iterate`.
    """
    if x.numel() == 0:
        return cast(x, dtype)
    return iterate(normalize(x.contiguous(), eps, dtype, normalization), polynomials, cubic, fused)


def scale_of(rows: int, columns: int, name: str) -> float:
    """Return the factor of one of :data:`SCALES` for a matrix."""
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    if name == "max_side":
        return math.sqrt(max(rows, columns))
    if name == "spectral":
        return math.sqrt(rows / max(1, columns))
    if name == "unscaled":
        return 1.0
    return math.sqrt(max(1.0, rows / max(1, columns)))
