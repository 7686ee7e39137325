"""Protocol of a compression: four pure functions, and their promises."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Compression(Protocol):
    """A way of sending one flat vector as bytes, with a known loss.

    Each rank sends ``encode(flat)`` to all others, and each decodes what it gets from all. So the
    number of bytes follows from the number of elements alone, and the bytes from the vector alone:
    the same vector makes the same bytes on every machine whose words are little-endian. What has
    to be added up is added in an order that is written down, in float64.

    A compression is a frozen dataclass: two with the same fields are equal, and may be used on
    different ranks.

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
        """The payload of a vector.

        Args:
            flat: shape (n,), float32, bfloat16 or float16, on any device; n may be 0. It is left
                as it is.

        Returns:
            shape (payload_bytes(n),), uint8, on the same device, in memory of its own.

        Raises:
            TypeError: flat is no tensor.
            ValueError: it is not 1-D, of another dtype (float64 too: what is exchanged is
                float32), or an element is infinite or NaN.
        """
        ...

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """The vector that a payload stands for.

        Args:
            payload: as ``encode`` returned it, on any rank.
            numel: elements of the vector.
            dtype: floating. What is decoded is computed in float32, and then rounded to it.

        Returns:
            shape (numel,), in memory of its own.

        Raises:
            TypeError: payload is no tensor.
            ValueError: it is not uint8, or not as long as it must be; dtype is not floating.
        """
        ...

    def payload_bytes(self, numel: int) -> int:
        """Return how many bytes the payload of a vector has, with its scales.

        Args:
            numel: elements of the vector.

        Raises:
            ValueError: numel is not a whole number >= 0.
        """
        ...

    def error_bound(self, flat: Tensor) -> Tensor:
        """Return how far the decoded values, in float32, may be from the given ones.

        Args:
            flat: as for ``encode``, which raises the same errors.

        Returns:
            shape (n,), float64: for each x a bound on |decode(encode(x)) - x|, rounding errors
            included.
        """
        ...
