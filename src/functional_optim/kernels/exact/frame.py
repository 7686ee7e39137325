"""Frame of a loop: its function, its threads, and its arguments."""

from typing import NamedTuple

import torch

from functional_optim.kernels.exact.values import PRELUDE, register_type

BLOCK = 128
"""Elements that a library is given at a time: few, so that memory is read meanwhile."""

ALONE = 32_768
"""Elements up to which one thread works alone."""


class Frame(NamedTuple):
    """A loop but for what it computes."""

    block_size: int
    """Elements of a block that the chain works in; 1 where each is on its own."""
    in_blocks: bool
    """Whether it goes from block to block."""
    fused: bool
    """Whether ``mad`` rounds once."""
    opaque: bool
    """Whether a float made a whole number, and again a float, has to go through both: without
    traps, compilers make one rounding of it, which keeps what no whole number is."""
    calls: tuple[str, ...]
    """What it wants of a library, by name."""
    precision: torch.dtype
    """The dtype that it wants them in."""
    arrays: int
    """How many tensors a leaf has."""

    def around(self, numbers: str, body: str) -> str:
        """The whole text.

        Args:
            numbers: lines that compute what is the same for all elements.
            body: what is done with one block, or with all elements.
        """
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
"""Nothing is computed in half precision, and GCC 12 makes of it what its assembler refuses."""
_OPAQUE = '#pragma GCC optimize("trapping-math")\n'
_SEPARATE = "template <class T> inline T mad(T x, T y, T z) { return x * y + z; }\n"
_FUSED = f"""\
{_SEPARATE}\
inline double mad(double x, double y, double z) {{ return __builtin_fma(x, y, z); }}
inline float mad(float x, float y, float z) {{ return __builtin_fmaf(x, y, z); }}
"""
_RUN_HEAD = """\
static void run(char* const* arrays, const char* gradient, const long from, const long to,
                const double* numbers, const Library& library) {
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
extern "C" void step(long leaves, const long* lengths, char* const* arrays,
                     const char* const* gradients, const double* numbers, long threads,
                     const Library* library) {
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
        char* const* own = arrays + k * ARRAYS;
        run(own, gradients ? gradients[k] : own[1], from, to, numbers, *library);
      }
      start += n;
    }
    if (library->threads) library->threads(before);
  }
}
"""
