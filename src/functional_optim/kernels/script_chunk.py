"""A chain over one chunk as TorchScript that allocates nothing but its scratch.

It is the program of the ``blocked`` kernel, operation by operation, written out for TorchScript:
the numbers of the step, the loop over pieces, and what is done with a piece.
"""

import sys
import typing
from collections.abc import Sequence
from string import Template
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.leaf import Leaf, Scalars, is_measured
from functional_optim.core.stage import Stage
from functional_optim.kernels.blocked import block_elements
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.cache_key import CacheKey, entry, key_of
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.graph import Trace
from functional_optim.kernels.kernel import KernelStep, nothing
from functional_optim.kernels.program import Program, block_program
from functional_optim.kernels.script_compiler import module_of, script, unfused, with_source
from functional_optim.kernels.script_text import scripted
from functional_optim.kernels.signature import VARIES, Several
from functional_optim.kernels.trace import trace
from functional_optim.kernels.validate import examples, same_bits, varied

PIECE = 1 << 16
"""Elements of a large leaf that are stepped at a time, where no cache is asked for its size."""

SCRIPT_NAMES: dict[str, Any] = {
    "torch": torch,
    "Tensor": Tensor,
    **{name: getattr(typing, name) for name in ("List", "Dict", "Tuple", "Optional")},
}
"""What every text may use."""


class ChunkText(NamedTuple):
    """The text of a chain for one signature and one dtype per tensor."""

    functions: str
    """Functions whose names end with ``NUMBER``; ``chunk_NUMBER`` is the one to call."""
    numbers: str
    """The numbers that it takes, as an expression of ``c``, the tuple of coefficients."""
    same: str
    """Whether other coefficients ``c`` have the same signature, as an expression."""
    fields: tuple[tuple[int | None, ...], ...]
    """For each field of each stage's state, how many tensors are in its list (None: no list)."""
    dtypes: tuple[torch.dtype, ...]
    """Of the chunk's tensors."""


class ScriptedChunk(NamedTuple):
    """A chain over one chunk, compiled."""

    run: Any
    """``run(tensors of the chunk, numbers, totals, elements of a piece)``."""
    text: ChunkText
    scratch: tuple[torch.dtype, ...]
    """The dtype of each piece of scratch that it needs."""
    operations: int
    """How many passes over its tensors it makes."""


NUMBER = "NUMBER"
"""Stands in the text for the number that tells several chunks of one program apart."""

# No node of a graph begins with an underscore, so that a rule's names are none of ours.
_FUNCTIONS = Template("""
def numbers_$n(numbers: List[float], totals: List[Tensor]) -> Tuple[$kinds]:
$compute_scalars    return $scalar_args


def block_$n($arguments) -> None:
$body

def chunk_$n(
    _tensors: List[Tensor], _numbers: List[float], _totals: List[Tensor], _piece: int
) -> None:
    _count = _tensors[0].numel()
$device$given$made    if _count <= _piece:
        block_$n($whole)
    else:
        _at = 0
        while _at < _count:
            _size = min(_piece, _count - _at)
            block_$n($part)
            _at += _size
""")


def _functions(
    trace: Trace, program: Program, scalar_args: Sequence[Any], *, measured: bool
) -> str:
    """The functions of one chunk.

    Raises:
        UntraceableError: something that TorchScript has no word for.
    """
    names = [node.name for node in trace.scalar_args]
    kinds = [
        _kind(node.name, value) for node, value in zip(trace.scalar_args, scalar_args, strict=True)
    ]
    floats = [name for name, kind in zip(names, kinds, strict=True) if kind != "Tensor"]
    head, body = scripted(trace.compute_scalars, ()), scripted(program.step, floats)
    chunk = [node.name for node in trace.chunk]
    scratch = [f"scratch_{i}" for i in range(len(program.scratch))]
    scalars = [f"scalar_{i}" for i in range(len(body.scalars))]
    typed = [f"{name}: Tensor" for name in chunk]
    typed += [f"{name}: {kind}" for name, kind in zip(names, kinds, strict=True)]
    room = [f"{name}: Tensor" for name in scratch]
    made = [
        f"    {name} = torch.empty([min(_piece, _count)], dtype={dtype}, device=_device)\n"
        for name, dtype in zip(scratch, program.scratch, strict=True)
    ]
    wrapped = "".join(
        f"    {name} = torch.scalar_tensor({value}, dtype=torch.float64)\n"
        for name, value in zip(scalars, body.scalars, strict=True)
    )
    shared = [*names, *scalars]
    totals = "[one.to(_device) for one in _totals]" if measured else "_totals"
    tensors = [f"_tensors[{k}]" for k in range(len(chunk))]
    cut = [f"{one}.narrow(0, _at, _size)" for one in tensors]
    cut += [*shared, *(f"{one}.narrow(0, 0, _size)" for one in scratch)]
    functions = _FUNCTIONS.substitute(
        n=NUMBER,
        kinds=", ".join(kinds) or "()",
        compute_scalars=head.body if names else "",
        scalar_args=head.result,
        arguments=", ".join([*typed, *(f"{name}: Tensor" for name in scalars), *room]),
        body=body.body,
        device="    _device = _tensors[0].device\n" if scratch or measured else "",
        given=f"    {', '.join(names)}, = numbers_{NUMBER}(_numbers, {totals})\n" if names else "",
        made="".join(made) + wrapped,
        whole=", ".join([*tensors, *shared, *scratch]),
        part=", ".join(cut),
    )
    return functions.strip("\n")


def _kind(name: str, value: Any) -> str:
    """The type of a scalar_args value."""
    for kind in (bool, int, float):
        if type(value) is kind:
            return kind.__name__
    if isinstance(value, Tensor):
        return "Tensor"
    raise UntraceableError(
        f"{name}, which is the same for all elements, is a {type(value).__name__}; a TorchScript "
        "program takes numbers and tensors there"
    )


def _numbers(static: Sequence[Any], at: str) -> list[str]:
    """Where the numbers are that change with the step."""
    found = []
    for i, value in enumerate(static):
        if value is VARIES:
            found.append(f"{at}[{i}]")
        elif isinstance(value, Several):
            found += _numbers(value.items, f"{at}[{i}]")
    return found


def _same(static: Sequence[Any], at: str) -> list[str]:
    """What tells whether the rest is as it was.

    Raises:
        UntraceableError: a choice that is no flag, whole number or text.
    """
    found = []
    for i, value in enumerate(static):
        if isinstance(value, Several) and value.kind is not list:
            found += _same(value.items, f"{at}[{i}]")
        elif value is not VARIES:
            if not isinstance(value, (bool, int, str)):
                raise UntraceableError(
                    f"a coefficient is {value!r}; a TorchScript program tells apart only bool, "
                    "int and str, and tuples of them"
                )
            found.append(f"{at}[{i}] == {value!r}")
    return found


_MADE: Cache[ScriptedChunk | str] = Cache()


def scripted_chunk(
    stages: tuple[Stage, ...], chunk: Leaf, totals: Sequence[Tensor]
) -> ScriptedChunk:
    """The program for a chunk, compiled once for its signature.

    Raises:
        UntraceableError: the chain cannot be written so; the text says why.
        NotPointwiseError: the chain looks at more than one element at a time.
    """
    reason = why_not_scripted(stages)
    if reason is not None:
        raise UntraceableError(reason)
    key, numbers, tensors = key_of(stages, chunk)
    found = _MADE.get_or_make(
        (stages, key, chunk.param.device.type),
        lambda: _made(stages, chunk, key, numbers, tensors, totals),
    )
    if isinstance(found, str):
        raise UntraceableError(found)
    return found


def why_not_scripted(stages: Sequence[Stage]) -> str | None:
    """Why a chain cannot be written so, by what its stages say; None if it may be."""
    for stage in stages:
        if stage.kind != "pointwise":
            return f"{stage.name} needs its whole tensor"
        if stage.granularity != 1:
            return f"{stage.name} works in blocks of {stage.granularity} elements"
    return None


def _made(
    stages: tuple[Stage, ...],
    chunk: Leaf,
    key: CacheKey,
    numbers: list[float],
    tensors: list[Tensor],
    totals: Sequence[Tensor],
) -> ScriptedChunk | str:
    """The program, or why there is none: that is asked for at every step."""
    try:
        shape = key.shape
        traced = trace(stages, key.classes, shape)
        totals = [total.to(chunk.param.device) for total in totals]
        scalar_args = traced.compute_scalars(numbers, totals)
        with torch.no_grad():
            program = block_program(traced, tensors, scalar_args, granularity=1)
        at = [(static, f"c[{i}]") for i, static in enumerate(shape.static)]
        wanted = [one for static, place in at for one in _numbers(static, place)]
        same = [one for static, place in at for one in _same(static, place)]
        text = ChunkText(
            _functions(traced, program, scalar_args, measured=bool(totals)),
            f"[{', '.join(wanted)}]",
            " and ".join(same) or "True",
            shape.fields,
            key.dtypes,
        )
        run = _compiled(text.functions, "chunk_0")
        _require_same(run, program, traced, tensors, numbers, totals)
    except UntraceableError as error:
        return str(error)
    return ScriptedChunk(run, text, program.scratch, traced.operations)


def _compiled(text: str, name: str) -> Any:
    functions = text.replace(NUMBER, "0")
    module = module_of(f"functional_optim_chunk_{abs(hash(functions)):x}", functions, SCRIPT_NAMES)
    try:
        return script(with_source(module, name))
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        said = str(error).strip().splitlines()
        raise UntraceableError(f"TorchScript does not take it: {' '.join(said[:2])}") from error


def _require_same(
    run: Any,
    program: Program,
    trace: Trace,
    tensors: Sequence[Tensor],
    numbers: list[float],
    totals: Sequence[Tensor],
) -> None:
    """Make sure that TorchScript gives, bit for bit, what the same operations give in Python.

    What is found is remembered for chunks of any values, so it is found by values that are the same
    for every caller; the caller's numbers are tried too, for those may be no numbers for this rule.

    Raises:
        UntraceableError: it does not, or fails.
    """
    if tensors[0].is_meta:  # has no values
        return
    with torch.no_grad():
        for tried in ([0.1 + k / 7 for k in range(len(numbers))], numbers):
            try:
                scalar_args = trace.compute_scalars(tried, totals)
            except (ArithmeticError, ValueError):
                continue
            few = examples(tensors, 1)
            first = [
                varied(one, k, one.numel()) if one.is_floating_point() else one
                for k, one in enumerate(few)
            ]
            second = [tensor.clone() for tensor in first]
            scratch = [torch.empty_like(first[0], dtype=dtype) for dtype in program.scratch]
            program.step(*first, *scalar_args, *scratch)
            try:
                # It takes the dtype of a view for a size.
                unfused(second, run, second, tried, list(totals), PIECE)
            except RuntimeError as error:
                said = str(error).strip().splitlines()
                raise UntraceableError(f"TorchScript fails at it: {said[-1]}") from error
            if not all(map(same_bits, first, second)):
                raise UntraceableError("TorchScript rounds it in another way")


def piece_elements(chunk: ScriptedChunk) -> int:
    """How many elements of a large leaf are done at a time.

    As many as the cache holds, so that what one operation writes the next one finds there. All,
    where there is only one operation, and of 16 bits, where it shows where a piece ends: how torch
    rounds there depends on its threads (see :mod:`functional_optim.kernels.shares`).
    """
    dtypes = chunk.text.dtypes
    if chunk.operations == 1 or min(dtype.itemsize for dtype in dtypes) <= 2:
        return sys.maxsize
    return block_elements(len(dtypes) + len(chunk.scratch))


def example_totals(stages: Sequence[Stage], device: torch.device) -> list[Tensor]:
    """A sum for each measured stage, for a program that is made before there are any."""
    count = sum(map(is_measured, stages))
    return [torch.ones((), dtype=torch.float64, device=device) for _ in range(count)]


class ScriptedChunkKernel:
    """A chain whose operations, traced, are written out for TorchScript."""

    exact = True

    def is_for(self, chunk: Leaf) -> bool:
        return chunk.scalars is Scalars.HOST

    def supports(self, stages: Sequence[Stage], chunk: Leaf) -> str | None:
        try:
            scripted_chunk(tuple(stages), chunk, example_totals(stages, chunk.param.device))
        except UntraceableError as error:
            return str(error)
        return None

    def bind(self, stages: Sequence[Stage], chunk: Leaf) -> KernelStep | str:
        if chunk.param.numel() == 0:
            return nothing
        device = chunk.param.device
        try:
            key, numbers, tensors = key_of(stages, chunk)
            scripted = entry(
                chunk,
                "script",
                key,
                lambda: scripted_chunk(tuple(stages), chunk, example_totals(stages, device)),
            )
        except UntraceableError as error:
            return str(error)
        small = chunk.param.numel() <= PIECE
        piece = PIECE if small else piece_elements(scripted)
        return lambda totals: unfused(tensors, scripted.run, tensors, numbers, list(totals), piece)

    def explain(self, stages: Sequence[Stage], chunk: Leaf) -> str:
        return "script"
