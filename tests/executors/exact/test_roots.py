"""Square roots of loops have torch's bits, in every implementation."""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import adamw
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.exact import kernel, library, roots
from functional_optim.kernels.exact.library import MODE, table
from functional_optim.kernels.exact.verdict import Verdict

from ..support import noise
from .support import assert_steps_are_equal

_KIND = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong)


@pytest.fixture
def anew() -> Iterator[None]:
    """Clear the caches of root functions before and after the test."""
    for one in (table, roots.roots_like):
        one.cache_clear()
    yield
    for one in (table, roots.roots_like):
        one.cache_clear()


def taken(numbers: Tensor) -> Tensor:
    """Return roots as a loop computes them in place."""
    found = table(("Sqrt",), torch.float32)
    assert found is not None
    result = numbers.clone()
    _KIND(found[2])(result.numel(), result.data_ptr(), result.data_ptr(), MODE)
    return result


def require_equal(numbers: Tensor) -> None:
    torch.testing.assert_close(taken(numbers), numbers.sqrt(), rtol=0, atol=0, equal_nan=True)


needs_library = pytest.mark.skipif(
    not library.has_library(), reason="this torch is built without Intel's library"
)


@needs_library
def test_floats_of_all_kinds() -> None:
    """Roots equal torch's for every 4,093rd float, and for all floats around every edge."""
    bits = torch.arange(-(2**31), 2**31, 4_093, dtype=torch.int64)
    require_equal(bits.to(torch.int32).view(torch.float32))
    for edge in (0, 0x00800000, 0x3F800000, 0x40800000, 0x7F7FEFFF, 0x7F800000):
        near = torch.arange(edge - 5_000, edge + 5_000, dtype=torch.int64)
        require_equal(near.to(torch.int32).view(torch.float32))


@needs_library
def test_ends() -> None:
    """Roots equal torch's for any length, also with a special number in the middle."""
    for length in range(40):
        for odd in (1e-41, 0.0, -1.0, float("inf"), float("nan"), 3.4028e38):
            numbers = noise(length, length + 3).abs()[3:]
            require_equal(numbers)
            if length:
                numbers[length // 2] = odd
                require_equal(numbers)


@needs_library
def test_where_denormals_are_flushed() -> None:
    """Roots of denormals equal torch's, even if the processor flushes denormals."""
    numbers = torch.arange(1, 60_000_000, 4_001, dtype=torch.int32).view(torch.float32)
    wanted = numbers.sqrt()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes no denormals")
    try:
        assert torch.equal(numbers.sqrt(), wanted)
        assert torch.equal(taken(numbers), wanted)
        assert float(torch.tensor(1e-38) * 0.1) == 0.0, "they are still flushed afterwards"
    finally:
        torch.set_flush_denormal(False)


@needs_library
@pytest.mark.usefixtures("anew")
def test_a_library_that_does_otherwise_is_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Loops call the library if it differs for one mantissa. The verdict is kept on disk."""
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(tmp_path))
    address = library._function("vmsSqrt")
    assert address is not None
    real, special = _KIND(address), 0x3FC12345

    def other(count: int, source: int, to: int, mode: int) -> None:
        real(count, source, to, mode)
        given, made = (
            torch.frombuffer((ctypes.c_int32 * count).from_address(one), dtype=torch.int32)
            for one in (source, to)
        )
        made += given == special

    other_entry = _KIND(other)
    wrong = ctypes.cast(other_entry, ctypes.c_void_p).value
    assert wrong is not None
    assert roots.roots_like(wrong, MODE) is None
    assert Verdict(roots.TEXT, roots.FLAGS).read() == b"unequal"
    roots.roots_like.cache_clear()
    assert roots.roots_like(address, MODE) is None, "it is found out once on a machine"
    monkeypatch.setattr(library, "_function", lambda _: wrong)
    found = table(("Sqrt",), torch.float32)
    assert found is not None
    assert found[2] == wrong


@needs_library
@pytest.mark.usefixtures("anew")
def test_steps_are_the_same_with_roots_of_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps() -> None:
        monkeypatch.setattr(kernel, "_PROGRAMS", Cache())
        assert_steps_are_equal(adamw(lr=1e-2), [noise(3, 5_003)], lambda k: [noise(k, 5_003)])

    steps()
    monkeypatch.setattr(library, "roots_like", lambda _, __: None)
    table.cache_clear()
    steps()
    found = table(("Sqrt",), torch.float32)
    assert found is not None
    assert found[2] == library._function("vmsSqrt")
