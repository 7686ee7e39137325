"""Frame of a loop: the C++ text of its functions, threads, and arguments."""

from typing import NamedTuple

import torch

from functional_optim.kernels.exact.values import PRELUDE, register_type

BLOCK = 128
"""Number of elements of one library call: small, so that memory is read at the same time."""

ALONE = 32_768
"""Largest number of elements for which one thread runs alone."""


class Frame(NamedTuple):
    """Text of a loop, except for its computations."""

    block_size: int
    """The granularity of the chain."""
    in_blocks: bool
    """True if the loop goes from block to block."""
    fused: bool
    """True if ``mad`` rounds once."""
    opaque: bool
    """True if a float is converted to an integer and back. With ``-fno-trapping-math``, compilers
    replace this by one rounding, which differs for floats outside the range of the integer."""
    calls: tuple[str, ...]
    """The names of the library functions."""
    precision: torch.dtype
    """The dtype of the library functions."""
    arrays: int
    """Number of tensors of a leaf."""

    def around(self, numbers: str, body: str) -> str:
        """Return the whole text."""
        block = self.block_size if self.block_size > 1 else BLOCK if self.in_blocks else 1024
        head = f"{_PLAIN_HALVES}{_OPAQUE if self.opaque else ''}"
        return (
            f"{head}{_FUSED if self.fused else _SEPARATE}{PRELUDE}"
            f"{self._library()}constexpr long GRANULARITY = {self.block_size}, BLOCK = {block};\n"
            f"{_RUN_HEAD}{numbers}{_BLOCKS if self.in_blocks else _WHOLE}{body}  }}\n}}\n"
            f"{_STEP.replace('ARRAYS', str(self.arrays)).replace('ALONE', str(ALONE))}"
        )

    def _library(self) -> str:
        kind = register_type(self.precision)
        entries = "".join(
            f"  void (*{name})(int, const {kind}*, {kind}*, long long);\n" for name in self.calls
        )
        return f"struct Library {{\n  long long mode;\n  int (*threads)(int);\n{entries}}};\n"


_PLAIN_HALVES = """\
#if defined(__AVX512FP16__) && !defined(__clang__)
#pragma GCC target("no-avx512fp16")
#endif
"""
"""GCC 12 emits half-precision instructions that its assembler rejects. No loop needs them."""
_OPAQUE = '#pragma GCC optimize("trapping-math")\n'
_SEPARATE = "template <class T> inline T mad(T x, T y, T z) { return x * y + z; }\n"
_FUSED = f"""\
{_SEPARATE}\
inline double mad(double x, double y, double z) {{ return __builtin_fma(x, y, z); }}
inline float mad(float x, float y, float z) {{ return __builtin_fmaf(x, y, z); }}
"""
_RUN_HEAD = """\
static void run(char* const* arrays, const long from, const long to, const double* numbers,
                const Library& library) {
"""
_BLOCKS = """\
  for (long o = from; o < to; o += BLOCK) {
    const long len = to - o < BLOCK ? to - o : BLOCK;
    const long group = o / GRANULARITY;
    (void)group;
"""
_WHOLE = """\
  {
    const long o = from, len = to - from;
"""
_STEP = """\
#ifdef _OPENMP
extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);
#endif
static inline long cut(long place, long length) {
  const long whole = place <= 0 ? 0 : (place + BLOCK - 1) / BLOCK * BLOCK;
  return whole < length ? whole : length;
}
extern "C" void step(long leaves, const long* lengths, char* const* arrays, const double* numbers,
                     long threads, const Library* library) {
  long total = 0;
  for (long k = 0; k < leaves; ++k) total += lengths[k];
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (threads > 1 && total > ALONE)
#endif
  {
    long thread = 0, team = 1;
#ifdef _OPENMP
    thread = omp_get_thread_num();
    team = omp_get_num_threads();
#endif
    const int before = library->threads ? library->threads(1) : 0;
    const long first = total / team * thread + total % team * thread / team;
    const long last = total / team * (thread + 1) + total % team * (thread + 1) / team;
    long start = 0;
    for (long k = 0; k < leaves && start < last; ++k) {
      const long n = lengths[k], from = cut(first - start, n), to = cut(last - start, n);
      if (from < to) {
        run(arrays + k * ARRAYS, from, to, numbers, *library);
      }
      start += n;
    }
    if (library->threads) library->threads(before);
  }
}
"""
