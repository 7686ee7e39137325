"""Protocol of a compression: four pure functions, and their guarantees."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Compression(Protocol):
    """Encoding of one flat vector as bytes, with a bounded error.

    Each rank sends ``encode(flat)`` to all ranks, and decodes the payloads of all ranks. So the
    number of bytes depends only on the number of elements, and the bytes only on the vector: the
    same vector gives the same bytes on every little-endian machine. Sums have a defined order, in
    float64.

    A compression is a frozen dataclass: two with the same fields are equal, and ranks may use
    either.

    Example::

        >>> import torch
        >>> from hooks.averaging.compression import Blocks, Compression
        >>> compression: Compression = Blocks(bits=8)
        >>> flat = torch.linspace(-1, 1, 1000)
        >>> payload = compression.encode(flat)
        >>> payload.dtype, len(payload), compression.payload_bytes(1000)
        (torch.uint8, 1016, 1016)
        >>> arrived = compression.decode(payload, 1000, torch.float32)
        >>> bool(((arrived - flat).abs() <= compression.error_bound(flat)).all())
        True
    """

    def encode(self, flat: Tensor) -> Tensor:
        """Return the payload of a vector.

        Args:
            flat: shape (n,), float32, bfloat16 or float16, on any device; n may be 0. Not changed.

        Returns:
            shape (payload_bytes(n),), uint8, on the same device, in new memory.

        Raises:
            TypeError: flat is not a tensor.
            ValueError: it is not 1-D, has another dtype (float64 too: payloads have at most float32
                precision), or an element is infinite or NaN.
        """
        ...

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the vector of a payload.

        Args:
            payload: from ``encode``, on any rank.
            numel: elements of the vector.
            dtype: floating. Decoding computes in float32, and then rounds to this dtype.

        Returns:
            shape (numel,), in new memory.

        Raises:
            TypeError: payload is not a tensor.
            ValueError: it is not uint8, or has another length; dtype is not floating.
        """
        ...

    def payload_bytes(self, numel: int) -> int:
        """Return the number of bytes of a vector's payload, with scales.

        Args:
            numel: elements of the vector.

        Raises:
            ValueError: numel is not an integer >= 0.
        """
        ...

    def error_bound(self, flat: Tensor) -> Tensor:
        """Return a bound on the difference of decoded (in float32) and original values.

        Args:
            flat: as for ``encode``, which raises the same errors.

        Returns:
            shape (n,), float64: for each x a bound on |decode(encode(x)) - x|, with rounding
            errors.
        """
        ...
