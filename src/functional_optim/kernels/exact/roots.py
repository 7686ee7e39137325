"""Square roots with the bits of Intel's library, without calling it.

On other vendors' processors, the library computes roots of four numbers at a time from the
processor's estimate of ``1 / sqrt(x)``. One step of Newton's method doubles the digits of the
estimate, and one correction gives the root:

    y ~ 1 / sqrt(x),    s = x y,    h = y / 2,    r = 1/2 - s h
    s' = s + s r,       h' = h + h r,             root = s' + (x - s' s') h'

Each operation is rounded separately, so the bits do not depend on the width of vectors. One result
in six is not the nearest float, but equals torch's ``sqrt``. A loop that calls the library for a
few elements at a time spends most of its time there. The same operations for eight numbers at a
time need a quarter of that time.

The functions are compared once per machine, for every mantissa. If they differ, the library is
called.
"""

import ctypes
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from functional_optim.core.bit_equality import same_bits
from functional_optim.kernels.exact.verdict import RIGHT, Verdict
from functional_optim.native import cache
from functional_optim.native.cache import CompileError

FLAGS = ("-O2", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared")
TEXT = """\
#ifdef __AVX2__
typedef float Floats __attribute__((vector_size(32)));
typedef int Bits __attribute__((vector_size(32)));
typedef float Unaligned __attribute__((vector_size(32), aligned(4)));
static inline Floats root(Floats x) {
  const Floats y = __builtin_ia32_rsqrtps256(x), s = x * y, h = y * 0.5f, r = 0.5f - s * h;
  const Floats t = s * r + s;
  Floats found = (x - t * t) * (h * r + h) + t;
  const Bits ordinary = (x >= 0x1p-126f) & (x <= 0x1.ffdffep127f);
  if (__builtin_expect(__builtin_ia32_movmskps256((Floats)ordinary) != 255, 0))
    for (int k = 0; k < 8; ++k)
      if (!ordinary[k]) found[k] = __builtin_sqrtf(x[k]);
  return found;
}
extern "C" void roots(int count, const float* from, float* to, long long) {
  const unsigned plain = 0x1f80, before = __builtin_ia32_stmxcsr();
  const bool other = (before & 0xffc0) != plain;  // denormals are flushed, say: the library is not
  if (other) __builtin_ia32_ldmxcsr(plain);
  int i = 0;
  for (; i + 8 <= count; i += 8) *(Unaligned*)(to + i) = root(*(const Unaligned*)(from + i));
  if (i < count) {
    Floats rest = {1, 1, 1, 1, 1, 1, 1, 1};
    for (int k = i; k < count; ++k) rest[k - i] = from[k];
    rest = root(rest);
    for (int k = i; k < count; ++k) to[k] = rest[k - i];
  }
  if (other) __builtin_ia32_ldmxcsr(before);
}
#endif
"""

_Roots = Callable[[int, int, int, int], None]
"""``roots(count, address of the numbers, address of the roots, mode of the library)``."""
_CALL = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong)
_AT_ONCE = 2**16


@lru_cache(maxsize=4)
def roots_like(library: int, mode: int) -> int | None:
    """Return the address of a function with the bits of the library's; None if there is none."""
    try:
        verdict = Verdict(TEXT, FLAGS)
        known = verdict.read()
        if known not in (None, RIGHT):
            return None
        loaded = cache.library(TEXT, FLAGS)
    except (CompileError, OSError):  # the compilation of the loop warns
        return None
    if not hasattr(loaded, "roots"):  # the processor lacks AVX2
        return None
    found = ctypes.cast(loaded.roots, ctypes.c_void_p).value
    assert found is not None
    if known is None:
        right = _are_equal(_CALL(found), _CALL(library), mode)
        verdict.write(right)
        return found if right else None
    return found


def _are_equal(ours: _Roots, theirs: _Roots, mode: int) -> bool:
    """Return True if two functions give the same bits. Any NaN equals any other NaN."""
    for bits in _samples():
        numbers = bits.to(torch.int32).view(torch.float32)
        found = [torch.empty_like(numbers) for _ in range(2)]
        for roots, one in zip((ours, theirs), found, strict=True):
            roots(numbers.numel(), numbers.data_ptr(), one.data_ptr(), mode)
        if not same_bits(*found):
            return False
    return True


def _samples() -> Iterator[Tensor]:
    """Yield bits of floats: a sample of all floats, the limits of normal floats, every mantissa.

    Two exponents have every mantissa, because a root halves the exponent. A factor of 4 changes
    only the exponents of all intermediate results, so these floats represent all normal floats.
    """
    yield torch.arange(-(2**31), 2**31, 2**16 - 1, dtype=torch.int64)
    for middle in (0, 0x00800000, 0x7F7FEFFF, 0x7F800000, 0x80000000 - 2**32):
        yield torch.arange(middle - _AT_ONCE // 2, middle + _AT_ONCE // 2, dtype=torch.int64)
    for start in range(0x3F800000, 0x40800000, _AT_ONCE):
        yield torch.arange(start, start + _AT_ONCE, dtype=torch.int64)
    for count in range(1, 24):  # less than a vector, and not a multiple of a vector
        yield torch.arange(0x3F800000, 0x40800000, 0x1000000 // count, dtype=torch.int64)[:count]
