"""The text by which a program steps a leaf that lies flat, with its state, in memory of its own.

A program may meet several kinds of leaves (other dtypes, other choices in a group of
hyper-parameters); each kind has its chunk. What fits none of them is stepped in new memory. For
many small leaves it counts how much is asked about each, so nothing is that all have in common.
"""

from collections.abc import Sequence
from itertools import combinations
from string import Template
from typing import NamedTuple

from functional_optim.core.stage import Stage
from functional_optim.kernels.script_chunk import NUMBER, ChunkText

KINDS = 8
"""Kinds of leaves that a program has chunks for, at most: each is compiled."""


class ProgramChunk(NamedTuple):
    """A chunk as a program has it."""

    text: ChunkText
    piece: int
    """Elements of a large leaf that it does at a time."""


# Both are flat and of one length, more than 1: where they begin at the same offset of one storage,
# they are the same view. Two tensors of one storage have the same view of none of its elements.
OVERLAP = """
def overlap(a: Tensor, b: Tensor, count: int, alike: bool) -> bool:
    if alike:
        apart = a.storage_offset() - b.storage_offset()
        if apart == 0:
            return a.is_set_to(b)
        if apart >= count or apart <= -count:
            return False
    return torch.as_strided(a, [0], [1], 0).is_set_to(torch.as_strided(b, [0], [1], 0))
""".strip("\n")

_TRY = Template("""
def try_$n($arguments, numbers: List[float], totals: List[Tensor]) -> bool:
    count = t0.numel()
    if count < 2 or $unfit:
        return False
$flat
    if $overlap:
        return False
    chunk_$n([$tensors], numbers, totals, $piece)
    return True
""")


def chunk_source(chunk: ProgramChunk, number: int) -> str:
    """The functions of one chunk; ``try_N(tensors, numbers, totals)`` tells whether it was fit."""
    dtypes = chunk.text.dtypes
    names = [f"t{k}" for k in range(len(dtypes))]
    unfit = [f"{one}.dtype != {dtype}" for one, dtype in zip(names, dtypes, strict=True)]
    unfit += [f"{one}.numel() != count" for one in names[1:]]
    unfit += [f"not {one}.is_contiguous()" for one in names]
    overlap = [
        f"overlap(t{i}, t{j}, count, {dtypes[i] == dtypes[j]})"
        for i, j in combinations(range(len(names)), 2)
    ]
    tried = _TRY.substitute(
        n=number,
        arguments=", ".join(f"{one}: Tensor" for one in names),
        unfit=" or ".join(unfit),
        flat="\n".join(
            f"    if {one}.dim() != 1:\n        {one} = {one}.view(-1)" for one in names
        ),
        overlap=" or ".join(overlap),
        tensors=", ".join(names),
        piece=chunk.piece,
    )
    return "\n\n\n".join([chunk.text.functions.replace(NUMBER, str(number)), tried.strip("\n")])


def before_leaves(chunks: Sequence[ProgramChunk]) -> list[str]:
    """What all leaves with the same coefficients have in common."""
    lines = []
    for n, chunk in enumerate(chunks):
        lines += [
            f"    fits_chunk_{n} = [{chunk.text.same} for c in coefficients]",
            f"    numbers_of_{n} = [{chunk.text.numbers} for c in coefficients]",
        ]
    return lines


def for_leaf(stages: Sequence[Stage], chunks: Sequence[ProgramChunk]) -> list[str]:
    """A leaf for which there is a chunk, and no more of it then.

    A chunk has all stages, so it begins with the gradient as it came.
    """
    lines = []
    for n, chunk in enumerate(chunks):
        tensors = ["params[k]", "grads[k]"]
        conditions = [f"fits_chunk_{n}[which[k]]"]
        for i, (stage, counts) in enumerate(zip(stages, chunk.text.fields, strict=True)):
            for name, count in zip(stage.state._fields if counts else (), counts, strict=True):
                field = f"s{i}[k].{name}"
                if count is None:
                    tensors.append(field)
                else:
                    tensors += [f"{field}[{j}]" for j in range(count)]
                    conditions.append(f"len({field}) == {count}")
        call = f"try_{n}({', '.join(tensors)}, numbers_of_{n}[which[k]], totals)"
        lines += [
            f"        if {' and '.join(conditions)}:",
            f"            if {call}:",
            "                continue",
        ]
    return lines
