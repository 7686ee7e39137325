"""Memory for what is received before it is added: reused, and as much as is in use at most."""

import threading

import torch
from torch import Tensor


class Scratch:
    """Buffers that come back.

    There are never more of them than were in use at once, and none is larger than the largest that
    was asked for.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lock = threading.Lock()
        self.allocated_bytes = 0
        """The bytes of all buffers, in use and free."""

    def take(self, nbytes: int) -> Tensor:
        """A buffer of at least so many bytes: the smallest that will do."""
        with self._lock:
            fitting = [at for at, one in enumerate(self._free) if one.numel() >= nbytes]
            if fitting:
                return self._free.pop(min(fitting, key=lambda at: self._free[at].numel()))
            if self._free:  # a larger one takes its place
                largest = max(range(len(self._free)), key=lambda at: self._free[at].numel())
                self.allocated_bytes -= self._free.pop(largest).numel()
            self.allocated_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def give(self, buffer: Tensor) -> None:
        """A buffer is free again."""
        with self._lock:
            self._free.append(buffer)
