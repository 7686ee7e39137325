"""The largest elements of each chunk, and where they stand.

    sent: (i, x_i) for the k = ceil(fraction n) largest |x_i| of a chunk x_1 ... x_n

An element that is not sent arrives as zero, so this wants error feedback. A chunk has 4096 elements
at most, and so an index has 12 bits. A selection over the whole vector would send indices of 32
bits, and find them more slowly.

Which of several equal magnitudes are sent is no matter of chance: those that stand first. Each
element has a whole number of its own as its key, the word of its magnitude above what is left to
the end of its chunk, so that no two are equal.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hooks.averaging.compression.bfloat16 import BFloat16
from hooks.averaging.compression.checks import check_payload, finite_float32, whole
from hooks.averaging.compression.packing import pack, packed_bytes, split, unpack
from hooks.averaging.compression.protocol import Compression
from hooks.averaging.compression.rows import in_rows

_INDEX_BITS = 12


@dataclass(frozen=True)
class TopK:
    """The ``ceil(fraction n)`` elements of largest magnitude of each chunk of n; the rest is zero.

    Of equal magnitudes the first are sent. The square error is at most (1 - fraction) |x|^2 and
    what the compression of the values adds; the error of an element that is not sent is |x|, and
    of one that is sent the bound of ``values``.

    Args:
        fraction: of the elements of a chunk, above 0 and at most 1.
        values: how what is chosen is sent; ``Statistical(bits=2)`` makes it 14 bits an element,
            index included, and a few bytes of levels. The values of a chunk stand together, the
            largest first.
        chunk: elements, from 1 to 4096; the last chunk may have fewer.

    Raises:
        TypeError: values is no compression.
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
        whole("chunk", self.chunk, least=1, most=1 << _INDEX_BITS)

    def encode(self, flat: Tensor) -> Tensor:
        """See :meth:`Compression.encode`."""
        wide = finite_float32(flat)
        places = self._chosen(wide)
        indices = pack((places % self.chunk).to(torch.int32), _INDEX_BITS)
        return torch.cat((indices, self.values.encode(wide[places])))

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`Compression.decode`."""
        check_payload(payload, self.payload_bytes(numel), numel, dtype)
        count = self._count(numel)
        indices, values = split(payload, self._sizes(numel))
        rank = torch.arange(count, device=payload.device)
        first = rank // self._of_chunk(self.chunk) * self.chunk
        places = first + unpack(indices, _INDEX_BITS, count)
        flat = torch.zeros(numel, dtype=dtype, device=payload.device)
        flat[places] = self.values.decode(values, count, dtype)
        return flat

    def payload_bytes(self, numel: int) -> int:
        """See :meth:`Compression.payload_bytes`."""
        return sum(self._sizes(whole("numel", numel, least=0)))

    def error_bound(self, flat: Tensor) -> Tensor:
        """The bound of the class; see :meth:`Compression.error_bound`."""
        wide = finite_float32(flat)
        places = self._chosen(wide)
        bound = wide.to(torch.float64).abs_()
        bound[places] = self.values.error_bound(wide[places])
        return bound

    def _of_chunk(self, numel: int) -> int:
        """Return how many elements of a chunk are sent."""
        return math.ceil(self.fraction * numel)

    def _count(self, numel: int) -> int:
        """Return how many elements of the vector are sent."""
        full, rest = divmod(numel, self.chunk)
        return full * self._of_chunk(self.chunk) + self._of_chunk(rest)

    def _sizes(self, numel: int) -> tuple[int, int]:
        """The bytes of the indices, and of the values."""
        count = self._count(numel)
        return packed_bytes(count, _INDEX_BITS), self.values.payload_bytes(count)

    def _chosen(self, wide: Tensor) -> Tensor:
        """The places in the vector of what is sent, chunk by chunk, the largest first: int64."""
        words = in_rows(wide, self.chunk).abs().view(torch.int32).to(torch.int64)
        left = torch.arange(self.chunk - 1, -1, -1, device=wide.device)
        keys = words * self.chunk + left
        best = keys.topk(self._of_chunk(self.chunk), dim=1, sorted=True).values
        within = self.chunk - 1 - best % self.chunk
        first = torch.arange(0, wide.numel(), self.chunk, device=wide.device).view(-1, 1)
        # The last chunk is filled up with zeros, which stand last, and sends fewer.
        return (first + within).view(-1)[: self._count(wide.numel())]
