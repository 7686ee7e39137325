"""Tests that a vector gives the same bytes on every machine, in every version."""

import hashlib

import torch

from hooks.averaging.compression import BFloat16, Blocks, Compression, TopK
from hooks.averaging.contrib import Statistical

from ..choices import case
from .support import Exact, arrived

DIGESTS: dict[Compression, str] = {
    Exact(): "397ff04131359809",
    BFloat16(): "cbd5fe6ede6e4640",
    Blocks(): "0a80895acb0b41bd",
    Blocks(bits=4): "86e35666d54faf3e",
    Blocks(scale_dtype=torch.bfloat16): "ac454bff6b2cd161",
    Statistical(): "0ebc6b5f72422250",
    Statistical(bits=1): "cb5cd742557a20ff",
    Statistical(bits=4): "06788642bca7fd21",
    TopK(fraction=0.03): "7ac4ed37623774d3",
    TopK(fraction=0.03, values=Statistical()): "a8ea14acf6bda0ae",
}
"""Digests of payloads; a new digest means a new format, which old ranks would misread."""


def vector() -> torch.Tensor:
    """Return 9999 numbers of both signs and 12 magnitudes, from integers and powers of two."""
    numbers = torch.arange(9999, dtype=torch.int64)
    mixed = numbers * 2654435761 % 1000003 - 500001
    powers = torch.tensor([2.0**-power for power in range(40)], dtype=torch.float32)
    return mixed.to(torch.float32) * powers[numbers * 7919 % 40]


def test_bytes_are_those_of_every_machine() -> None:
    for compression, digest in DIGESTS.items():
        with case(compression=compression):
            payload = compression.encode(vector())
            assert hashlib.sha256(bytes(payload.tolist())).hexdigest()[:16] == digest


def test_bytes_do_not_depend_on_the_number_of_threads() -> None:
    flat = vector().repeat(40)
    threads = torch.get_num_threads()
    try:
        for compression in DIGESTS:
            with case(compression=compression):
                payloads = []
                for count in (1, 3):
                    torch.set_num_threads(count)
                    payloads.append(compression.encode(flat))
                assert torch.equal(*payloads)
    finally:
        torch.set_num_threads(threads)


def test_of_equal_magnitudes_the_first_are_sent() -> None:
    flat = torch.tensor([1.0, -2.0, 2.0, 2.0, -1.0, 0.0, 0.0, -2.0, 3.0, 3.0])
    for fraction, kept in ((0.125, [1, 8]), (0.3, [1, 2, 3, 8]), (0.6, [0, 1, 2, 3, 7, 8, 9])):
        with case(fraction=fraction):
            got = arrived(TopK(fraction=fraction, values=Exact(), chunk=8), flat)
            expected = torch.zeros(10)
            expected[kept] = flat[kept]
            assert torch.equal(got, expected)


def test_magnitudes_are_compared_to_the_last_digit() -> None:
    flat = torch.arange(4096, dtype=torch.int32).add(1 << 29).view(torch.float32)
    got = arrived(TopK(fraction=1 / 4096, values=Exact()), flat)
    assert got.nonzero().tolist() == [[4095]]


def test_each_chunk_sends_its_share_of_largest_elements() -> None:
    flat = vector()
    got = arrived(TopK(fraction=0.03, values=Exact()), flat)
    for chunk, of_chunk in zip(flat.split(4096), got.split(4096), strict=True):
        sent = of_chunk != 0
        assert int(sent.sum()) == -(-3 * len(chunk) // 100)
        assert torch.equal(of_chunk[sent], chunk[sent])
        assert chunk[sent].abs().min() >= chunk[~sent].abs().max()
