"""Calls that every transport must answer, made on one worker."""

from typing import Any

import torch
from torch import Tensor

from functional_optim.remote import Transport

from .support import LIMIT


class Shelf:
    """Object to place on a worker; it stores tensors."""

    def __init__(self, first: Tensor) -> None:
        if first.numel() == 0:
            raise LookupError("nothing to keep")
        self.kept = [first]

    def add(self, other: Tensor) -> int:
        self.kept.append(other)
        return len(self.kept)

    def total(self) -> Tensor:
        return torch.stack(self.kept).sum(0)

    def fail(self) -> None:
        raise KeyError("no such thing")


class Count:
    """Object to place on a worker, without support for weak references."""

    __slots__ = ("made",)

    def __init__(self) -> None:
        self.made = 0

    def next(self) -> int:
        self.made += 1
        return self.made


def tried(transport: Transport, worker: str) -> dict[str, Any]:
    """Try calls and errors over a transport; return results that JSON can store."""
    handle = transport.place(worker, Shelf, torch.ones(2)).result(LIMIT)
    other = transport.place(worker, Shelf, torch.zeros(2)).result(LIMIT)
    added = [transport.call(handle, "add", torch.full((2,), float(k))) for k in range(5)]
    bare = transport.place(worker, Count).result(LIMIT)
    counts = sorted(one.result(LIMIT) for one in added)
    errors = [
        transport.place(worker, Shelf, torch.ones(0)).exception(LIMIT),
        transport.call(handle, "fail").exception(LIMIT),
        transport.call(handle, "absent").exception(LIMIT),
    ]
    return {
        "counts": counts,
        "bare": [transport.call(bare, "next").result(LIMIT) for _ in range(2)],
        "total": transport.call(handle, "total").result(LIMIT).tolist(),
        "other": transport.call(other, "total").result(LIMIT).tolist(),
        "errors": [f"{type(one).__name__}: {one}" for one in errors],
    }


WANTED = {
    "counts": [2, 3, 4, 5, 6],
    "bare": [1, 2],
    "total": [11.0, 11.0],
    "other": [0.0, 0.0],
    "errors": [
        "LookupError: nothing to keep",
        "KeyError: 'no such thing'",
        "AttributeError: 'Shelf' object has no attribute 'absent'",
    ],
}
