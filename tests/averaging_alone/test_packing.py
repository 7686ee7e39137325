"""Packing of few-bit numbers into bytes."""

import torch

from hooks.averaging.compression.packing import pack, packed_bytes, unpack

from ..choices import case

BITS = (1, 2, 4, 8, 12)


def test_what_is_packed_is_unpacked() -> None:
    for bits in BITS:
        for count in (*range(18), 1000):
            with case(bits=bits, count=count):
                dtype = torch.int32 if bits > 8 else torch.uint8
                codes = torch.arange(count).mul(2654435761).remainder(1 << bits).to(dtype)
                packed = pack(codes, bits)
                assert packed.dtype == torch.uint8
                assert packed.shape == (packed_bytes(count, bits),)
                assert torch.equal(unpack(packed, bits, count), codes)


def test_no_bit_is_left_empty_but_in_the_last_byte() -> None:
    for bits in BITS:
        for count in range(1, 18):
            with case(bits=bits, count=count):
                dtype = torch.int32 if bits > 8 else torch.uint8
                packed = pack(torch.full((count,), (1 << bits) - 1, dtype=dtype), bits)
                ones = sum(int(byte).bit_count() for byte in packed)
                assert ones == count * bits
                assert 8 * len(packed) - ones < 8


def test_the_first_number_has_the_lowest_bits() -> None:
    for bits, codes, expected in (
        (1, [1, 0, 1, 1, 0, 0, 0, 0, 1], [0b1101, 1]),
        (2, [1, 2, 3, 0, 2], [0b111001, 2]),
        (4, [1, 2, 3], [0x21, 3]),
        (8, [255, 3], [255, 3]),
        (12, [0xABC, 0x123, 0x456], [0xBC, 0x3A, 0x12, 0x56, 0x04]),
    ):
        with case(bits=bits):
            dtype = torch.int32 if bits > 8 else torch.uint8
            assert pack(torch.tensor(codes, dtype=dtype), bits).tolist() == expected
