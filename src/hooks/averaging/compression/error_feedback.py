"""Error feedback: a compression's loss is sent later.

    p_t = x_t + e_t
    sent: C(p_t)
    e_(t+1) = p_t - decoded C(p_t),        e_1 = 0

The errors telescope: what was decoded in T rounds, and e_(T+1), add up to what was given. So the
mean of what arrives differs from the mean of what was given by e_(T+1) / T, and e stays bounded
for each compression here: what one loses is never longer than what it was given.
"""

from typing import Any

import torch
from torch import Tensor

from hooks.averaging.compression.checks import finite_float32
from hooks.averaging.compression.protocol import Compression


def with_error_feedback(
    compression: Compression, flat: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """Encode a vector together with what was lost before, and keep what is lost now.

    ::

        payload = encode(flat + residual)
        new_residual = flat + residual - decode(payload)

    The residual belongs to one rank and one vector: it is a part of that rank's state, and of its
    checkpoint. It starts at zeros. MuLoCo and SparseLoCo let it fade: they would give
    ``beta * residual``, and what fades is never sent.

    Args:
        compression: any.
        flat: shape (n,), what this rank would send; float32, bfloat16 or float16.
        residual: shape (n,), float32, on the same device: what the last round returned. It is left
            as it is.

    Returns:
        (payload, new_residual): uint8 of shape (compression.payload_bytes(n),), and float32 of
        shape (n,).

    Raises:
        TypeError: flat or residual is no tensor.
        ValueError: flat, or its sum with the residual, is refused by ``encode``; residual is of
            another shape, dtype or device.

    Example::

        >>> import torch
        >>> from hooks.averaging.compression import TopK, with_error_feedback
        >>> largest, flat = TopK(fraction=0.5), torch.tensor([4.0, 3.0])
        >>> residual, arrived = torch.zeros(2), torch.zeros(2)
        >>> for _ in range(7):
        ...     payload, residual = with_error_feedback(largest, flat, residual)
        ...     arrived += largest.decode(payload, 2, torch.float32)
        >>> arrived, residual
        (tensor([28., 18.]), tensor([0., 3.]))

    Reference:
        Karimireddy, Rebjock, Stich and Jaggi, "Error Feedback Fixes SignSGD and other Gradient
        Compression Schemes", 2019 (arXiv 1901.09847), algorithm 1, its step size being in flat.
    """
    wide = finite_float32(flat)
    _check_residual(residual, wide)
    total = wide + residual.detach()
    payload = compression.encode(total)
    return payload, total.sub_(compression.decode(payload, total.numel(), torch.float32))


def _check_residual(residual: Any, wide: Tensor) -> None:
    if not isinstance(residual, Tensor):
        raise TypeError(f"residual must be a tensor, got {type(residual).__name__}")
    for what, got, want in (
        ("shape", tuple(residual.shape), tuple(wide.shape)),
        ("dtype", residual.dtype, torch.float32),
        ("device", residual.device, wide.device),
    ):
        if got != want:
            raise ValueError(
                f"residual has {what} {got}, it must have {want}: it starts as "
                "torch.zeros_like(flat, dtype=torch.float32), and is what the last round returned"
            )
