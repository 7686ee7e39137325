"""Values of a generated loop: their C++ types and conversions."""

from typing import NamedTuple

import torch

from functional_optim.kernels.errors import UntraceableError

_REGISTER = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "float",
    torch.float16: "float",
    torch.bool: "bool",
    torch.uint8: "unsigned char",
    torch.int8: "signed char",
    torch.int16: "short",
    torch.int32: "int",
    torch.int64: "long long",
}
_SHORT = {torch.bfloat16: "bf16", torch.float16: "half"}
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


class Value(NamedTuple):
    """Operand: an element of a tensor, or a number for all elements."""

    text: str
    """The C++ expression."""
    dtype: torch.dtype | None
    """The dtype of the tensor; None for a number, which is a double."""
    constant: float | None = None
    """The number, if it is a constant of the graph."""
    is_tensor: bool = False
    """True if torch has the number as a 0-d tensor."""


def register_type(dtype: torch.dtype) -> str:
    """Return the C++ type for computations with a dtype, which is float for 16-bit floats."""
    try:
        return _REGISTER[dtype]
    except KeyError:
        raise UntraceableError(f"no loop is written for {dtype}") from None


def memory_type(dtype: torch.dtype) -> str:
    """Return the C++ type of an element in memory."""
    return _SHORT.get(dtype, register_type(dtype))


def loaded(text: str, dtype: torch.dtype) -> str:
    """Return a value read from memory, in the type of computation."""
    return f"widen({text})" if dtype in _SHORT else text


def to_store(text: str, dtype: torch.dtype) -> str:
    """Return a value as stored in memory. Values of 16-bit dtypes are rounded already."""
    return f"({_SHORT[dtype]}::narrow({text}))" if dtype in _SHORT else text


def rounded(text: str, dtype: torch.dtype) -> str:
    """Return a result in the register type, rounded to its dtype."""
    if dtype in _SHORT:
        return f"widen({_SHORT[dtype]}::narrow({text}))"
    return f"({register_type(dtype)})({text})"


def cast(value: Value, dtype: torch.dtype) -> str:
    """Return an operand in the type in which torch's kernel for ``dtype`` computes.

    Numbers are not rounded to 16 bits, because kernels take them in the type of the computation.
    """
    if value.constant is not None:
        return literal(value.constant, dtype)
    kind = register_type(dtype)
    if value.dtype == dtype:
        return value.text
    if value.dtype is None:
        return f"(({kind}){'(long long)' * (dtype in INTEGERS)}{value.text})"
    if dtype == torch.bool:
        return f"({value.text} != 0)"
    if (
        dtype == torch.uint8 and value.dtype not in INTEGERS
    ):  # torch converts to a wider integer first
        return f"(({kind})({'long long' if value.dtype == torch.float64 else 'int'}){value.text})"
    return rounded(value.text, dtype)


def literal(number: float, dtype: torch.dtype) -> str:
    """Return a number as C++ text in the register type of ``dtype``."""
    kind = register_type(dtype)
    if dtype == torch.bool:
        return "true" if number else "false"
    if dtype in INTEGERS:
        return f"(({kind}){int(number)}LL)"
    if number != number:  # noqa: PLR0124  NaN
        return f'(({kind})__builtin_nan(""))'
    if number in (float("inf"), float("-inf")):
        return f"(({kind}){'-' if number < 0 else ''}__builtin_inf())"
    return f"(({kind}){float(number).hex()})"


PRELUDE = """\
template <class To, class From> inline To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To y;
  __builtin_memcpy(&y, &x, sizeof(To));
  return y;
}
struct bf16 {
  unsigned short raw;
  static inline bf16 narrow(float x) {
    const unsigned u = bits<unsigned>(x);
    const unsigned short even = (unsigned short)((u + (0x7fffu + ((u >> 16) & 1u))) >> 16);
    return {x != x ? (unsigned short)0x7fc0u : even};
  }
};
inline float widen(bf16 x) { return bits<float>((unsigned)x.raw << 16); }
#ifdef __FLT16_MAX__
struct half {
  _Float16 raw;
  static inline half narrow(float x) { return {(_Float16)x}; }
};
inline float widen(half x) { return (float)x.raw; }
#endif
inline float root(float x) { return __builtin_sqrtf(x); }
inline double root(double x) { return __builtin_sqrt(x); }
inline float size(float x) { return __builtin_fabsf(x); }
inline double size(double x) { return __builtin_fabs(x); }
inline bool is_infinite(float x) { return __builtin_isinf(x); }
inline bool is_infinite(double x) { return __builtin_isinf(x); }
template <class T> inline bool is_infinite(T) { return false; }
template <class T>
inline T single(void (*call)(int, const T*, T*, long long), T x, long long mode) {
  T y;
  call(1, &x, &y, mode);
  return y;
}
template <class T> inline T size(T x) { return x < 0 ? -x : x; }
template <class T> inline T lerp(T from, T to, T weight) {
  const bool near = size(weight) < (T)0.5;
  return mad(near ? weight : weight - (T)1, to - from, near ? from : to);
}
template <class T> inline T sign(T x) { return (T)(x > 0) - (T)(x < 0); }
template <class T> inline T larger(T x, T y) { return x != x ? x : (x > y ? x : y); }
template <class T> inline T smaller(T x, T y) { return x != x ? x : (x < y ? x : y); }
template <class T> inline T least(T x, T low) { return x < low ? low : x; }
template <class T> inline T most(T x, T high) { return x > high ? high : x; }
"""
"""Functions of every loop, after ``mad``. No header is included, because compiling one is slow."""
