"""Pointwise chains whose leaves cannot be stepped as chunks, because of rounding or 0-d states.

Torch computes most elements of a tensor in vectors, and the last elements one by one. A few
operations round differently in these two cases. A chain with such an operation equals the reference
only if each tensor is stepped whole, and not as part of a flat buffer or in blocks. Chunks also
exclude 0-d parameters of a chain that keeps a 0-d state for each parameter.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from functional_optim.core.leaf import Leaf
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.kernels.cache import MAX_ENTRIES
from functional_optim.kernels.chunks import UNCHUNKABLE, why_not_pointwise
from functional_optim.kernels.errors import NotPointwiseError, UntraceableError
from functional_optim.kernels.graph import Trace
from functional_optim.kernels.signature import signature
from functional_optim.kernels.trace import trace
from functional_optim.numeric import KEEPS_NUMBER

_NAMES = frozenset(
    [
        *("arctan2", "arctanh", "atan2", "atanh", "celu", "cosh", "elu", "exp2", "expit", "gelu"),
        *("hypot", "logaddexp", "logaddexp2", "logit", "mish", "selu", "sigmoid", "silu"),
        *("sinh", "softplus"),
    ]
)
"""Operations that round differently at the end of a tensor, for all arguments."""

_SUMS = frozenset(["add", "sub", "subtract", "rsub"])
_POWERS = frozenset(["float_power", "pow"])
_SAFE_POWERS = frozenset([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0])
"""Exponents for which torch has a special operation, which rounds all elements in the same way."""


def record_rounding(stages: Sequence[Stage], leaf: Leaf) -> None:
    """Record in ``chunks`` if a chain rounds by position, or keeps 0-d states of parameters."""
    chain = tuple(stages)
    if not leaf.param.is_cpu or block_size_of(chain) > 1 or why_not_pointwise(chain) is not None:
        return
    try:
        shape, numbers, _ = signature(chain, leaf)
        traced = trace(chain, tuple(map(type, leaf.coefficients)), shape)
        found = _find_rounding(traced, numbers)
        reason = found and f"torch rounds {found} by where an element is in its tensor"
    except UntraceableError as error:
        reason = KEEPS_NUMBER if KEEPS_NUMBER in str(error) else None
    except (ArithmeticError, NotPointwiseError, ValueError):
        return
    if reason is None:
        return
    if len(UNCHUNKABLE) >= MAX_ENTRIES:
        UNCHUNKABLE.clear()
    UNCHUNKABLE[chain] = reason


def _find_rounding(traced: Trace, numbers: Any) -> str | None:
    """Return the operation that rounds by position; None if there is none."""
    values: dict[fx.Node, Any] = {}
    for node in traced.graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        name = name.removeprefix("special_")
        if node.op == "placeholder" or name not in _NAMES | _SUMS | _POWERS:
            continue
        if name in _NAMES:
            return name
        if not values:
            totals = [torch.ones((), dtype=torch.float64)] * traced.totals
            made = traced.compute_scalars(numbers, totals)
            values = dict(zip(traced.scalar_args, made, strict=True))
        given = [values.get(one, one) if isinstance(one, fx.Node) else one for one in node.args]
        if name in _SUMS and node.kwargs.get("alpha", 1) != 1 and not all(map(_is_tensor, given)):
            return f"{name}(tensor, number, alpha=...)"
        if name in _POWERS and not _is_safe(given):
            return f"{name} with this exponent"
    return None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (fx.Node, Tensor))


def _is_safe(given: Sequence[Any]) -> bool:
    """Return True if a power rounds all elements in the same way."""
    base, exponent = given[0], given[1] if len(given) > 1 else 1.0
    return _is_tensor(base) and not _is_tensor(exponent) and float(exponent) in _SAFE_POWERS
