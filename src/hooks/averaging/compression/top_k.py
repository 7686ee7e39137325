"""Compression to the largest elements of each chunk, and their indices.

    sent: (i, x_i) for the k = ceil(fraction n) largest |x_i| of a chunk x_1 ... x_n

Elements that are not sent are decoded as zero, so use error feedback. A chunk has at most 4096
elements, so that an index has 12 bits. A selection over the whole vector would need 32 bits per
index, and more time.

Of equal magnitudes, the first are sent. For that, each element gets a unique integer key: the bits
of its magnitude, followed by the distance to the end of its chunk.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hooks.averaging.compression.bfloat16 import BFloat16
from hooks.averaging.compression.checks import check_int, check_payload, finite_float32
from hooks.averaging.compression.packing import pack, packed_bytes, to_rows, unpack
from hooks.averaging.compression.protocol import Compression

_INDEX_BITS = 12


@dataclass(frozen=True)
class TopK:
    """The ``ceil(fraction n)`` elements of largest magnitude of each chunk of n; the rest is zero.

    Of equal magnitudes the first are sent. The square error is at most (1 - fraction) |x|^2 plus
    that of ``values``. The error of an element is |x| if it is not sent, otherwise bounded by
    ``values``.

    Args:
        fraction: of the elements of a chunk, above 0 and at most 1.
        values: compression of the sent values, in order of chunks, the largest of each first.
            ``Statistical(bits=2)`` gives 14 bits per element, with index, and a few bytes of
            levels.
        chunk: number of elements, from 1 to 4096; the last chunk may be shorter.

    Raises:
        TypeError: values is not a compression.
        ValueError: fraction or chunk is out of bounds.

    Example::

        >>> import torch
        >>> from hooks.averaging.compression import TopK
        >>> largest, flat = TopK(fraction=0.25), torch.tensor([1.0, -3.0, 3.0, 0.5, 0.0])
        >>> largest.payload_bytes(5)
        7
        >>> largest.decode(largest.encode(flat), 5, torch.float32)
        tensor([ 0., -3.,  3.,  0.,  0.])

    Reference:
        Sarfi, Therien, Lidin and Belilovsky, "Communication Efficient LLM Pre-training with
        SparseLoCo", 2025 (arXiv 2508.15706).
    """

    fraction: float
    values: Compression = field(default_factory=BFloat16)
    chunk: int = 4096

    def __post_init__(self) -> None:
        given: Any = self.fraction
        values: Any = self.values
        if not isinstance(given, (int, float)) or isinstance(given, bool) or not 0 < given <= 1:
            raise ValueError(f"fraction must be a number above 0 and at most 1, got {given!r}")
        if not isinstance(values, Compression) or isinstance(values, type):
            raise TypeError(f"values must be a compression, such as BFloat16(), got {values!r}")
        check_int("chunk", self.chunk, least=1, most=1 << _INDEX_BITS)

    def encode(self, flat: Tensor) -> Tensor:
        """See :meth:`Compression.encode`."""
        wide = finite_float32(flat)
        positions = self._select(wide)
        indices = pack((positions % self.chunk).to(torch.int32), _INDEX_BITS)
        return torch.cat((indices, self.values.encode(wide[positions])))

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`Compression.decode`."""
        check_payload(payload, self.payload_bytes(numel), numel, dtype)
        count = self._count(numel)
        indices, values = payload.split(self._sizes(numel))
        rank = torch.arange(count, device=payload.device)
        first = rank // self._sent_per_chunk(self.chunk) * self.chunk
        positions = first + unpack(indices, _INDEX_BITS, count)
        flat = torch.zeros(numel, dtype=dtype, device=payload.device)
        flat[positions] = self.values.decode(values, count, dtype)
        return flat

    def payload_bytes(self, numel: int) -> int:
        """See :meth:`Compression.payload_bytes`."""
        return sum(self._sizes(check_int("numel", numel, least=0)))

    def error_bound(self, flat: Tensor) -> Tensor:
        """Return the bound of the class; see :meth:`Compression.error_bound`."""
        wide = finite_float32(flat)
        positions = self._select(wide)
        bound = wide.to(torch.float64).abs_()
        bound[positions] = self.values.error_bound(wide[positions])
        return bound

    def _sent_per_chunk(self, numel: int) -> int:
        """Return the number of sent elements of a chunk."""
        return math.ceil(self.fraction * numel)

    def _count(self, numel: int) -> int:
        """Return the number of sent elements of the vector."""
        full, rest = divmod(numel, self.chunk)
        return full * self._sent_per_chunk(self.chunk) + self._sent_per_chunk(rest)

    def _sizes(self, numel: int) -> list[int]:
        """Return the bytes of the indices, and of the values."""
        count = self._count(numel)
        return [packed_bytes(count, _INDEX_BITS), self.values.payload_bytes(count)]

    def _select(self, wide: Tensor) -> Tensor:
        """Return the positions of sent elements, chunk by chunk, the largest first: int64."""
        words = to_rows(wide, self.chunk).abs().view(torch.int32).to(torch.int64)
        left = torch.arange(self.chunk - 1, -1, -1, device=wide.device)
        keys = words * self.chunk + left
        best = keys.topk(self._sent_per_chunk(self.chunk), dim=1, sorted=True).values
        within = self.chunk - 1 - best % self.chunk
        first = torch.arange(0, wide.numel(), self.chunk, device=wide.device).view(-1, 1)
        # The last chunk is padded with zeros, which sort last, and sends fewer elements.
        return (first + within).view(-1)[: self._count(wide.numel())]
