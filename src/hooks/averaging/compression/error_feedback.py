"""Error feedback: the error of a compression is added to the next vector.

    p_t = x_t + e_t
    sent: C(p_t)
    e_(t+1) = p_t - decoded C(p_t),        e_1 = 0

The errors telescope: the decoded vectors of T rounds plus e_(T+1) equal the sum of all inputs. So
the mean of decoded vectors differs from the mean of inputs by e_(T+1) / T. Here e stays bounded,
because the error of each compression is never longer than its input.
"""

from typing import Any

import torch
from torch import Tensor

from hooks.averaging.compression.checks import finite_float32
from hooks.averaging.compression.protocol import Compression


def with_error_feedback(
    compression: Compression, flat: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """Encode a vector plus the last error, and return the payload and the new error.

    ::

        payload = encode(flat + residual)
        new_residual = flat + residual - decode(payload)

    The residual belongs to one rank and one vector: save it in that rank's checkpoint. It starts at
    zeros. MuLoCo and SparseLoCo pass ``beta * residual``, and never send the rest.

    Args:
        compression: any.
        flat: shape (n,), the vector to send; float32, bfloat16 or float16.
        residual: shape (n,), float32, on the same device: from the last round. Not changed.

    Returns:
        (payload, new_residual): uint8 of shape (compression.payload_bytes(n),), and float32 of
        shape (n,).

    Raises:
        TypeError: flat or residual is not a tensor.
        ValueError: ``encode`` refuses flat, or its sum with the residual; residual has another
            shape, dtype or device.

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
