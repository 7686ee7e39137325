"""Storages for ``torch.distributed.checkpoint`` whose files are durable and have checksums.

Importing this package imports ``torch.distributed.checkpoint``, which is slow; ``sharding`` itself
does not.
"""

from sharding.storage.reader import ChecksumReader
from sharding.storage.writer import ChecksumWriter

__all__ = ["ChecksumReader", "ChecksumWriter"]
