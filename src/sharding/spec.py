"""ParameterSpec: description of a parameter for a plan, without a tensor or a process group."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from functional_optim import Optimizer
from functional_optim.engine.messages import format_value
from functional_optim.engine.stages import Kind, MatrixBlocks

MOST_ELEMENTS = 2**63 - 1
KINDS: tuple[Kind, ...] = ("pointwise", "per_matrix")


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """Parameter of a plan: its name, its size, and if it can be cut.

    Args:
        path: its name, unique in a plan, as in ``module.named_parameters()``.
        shape: its shape; ``()`` for a 0-d parameter.
        dtype: its dtype, which is also that of its gradient.
        device: its device. An index differs between ranks, so a plan that is compared across ranks
            has the type only ("cuda").
        requires_grad: True if it is trained. A frozen parameter has an owner, but neither gradient
            nor state.
        kind: "pointwise" (the rule can be run on any range of elements) or "per_matrix" (the rule
            needs the whole tensor, so one rank owns it).
        group: index of its parameter group.
        blocks: the matrices of a per_matrix parameter, such as heads or experts. Each is planned
            and stepped like a separate parameter. None if the parameter is one matrix.

    Raises:
        TypeError: ``path`` is not a string, a size is not an integer, ``dtype`` is not a dtype,
            ``requires_grad`` is not a bool, or ``blocks`` is not :class:`~sharding.MatrixBlocks`.
        ValueError: an empty path, a negative size or group, more elements than a tensor can have,
            an unknown kind, a device that torch does not know, blocks of a pointwise parameter, or
            blocks that do not divide its shape.

    Example::

        >>> import torch
        >>> ParameterSpec("layer.weight", (3, 4), torch.bfloat16).numel
        12
        >>> thirds = MatrixBlocks(row_blocks=3)
        >>> ParameterSpec("qkv", (12, 4), kind="per_matrix", blocks=thirds).bounds
        [0, 16, 32, 48]
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    requires_grad: bool = True
    kind: Kind = "pointwise"
    group: int = 0
    blocks: MatrixBlocks | None = None

    def __post_init__(self) -> None:
        """Check all fields."""
        object.__setattr__(self, "shape", _check_shape(self.path, self.shape))
        dtype: Any = self.dtype
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype of {self.path!r} must be a torch.dtype, got {dtype!r}")
        if self.kind not in KINDS:
            raise ValueError(
                f"kind of {self.path!r} must be one of {', '.join(KINDS)}, got {self.kind!r}"
            )
        if type(self.requires_grad) is not bool:
            raise TypeError(
                f"requires_grad of {self.path!r} must be True or False, got {self.requires_grad!r}"
            )
        if type(self.group) is not int or self.group < 0:
            raise ValueError(
                f"group of {self.path!r} must be the index of a group, 0 or more, "
                f"got {self.group!r}"
            )
        if type(self.device) is not str:
            object.__setattr__(self, "device", str(self.device))
        if not _is_device(self.device):
            raise ValueError(
                f"device of {self.path!r} must be the name of one of torch's, such as 'cpu', "
                f"'cuda', 'cuda:1' (or 'cuda 1', the second of several), got {self.device!r}"
            )
        if self.blocks is not None:
            _check_blocks(self.path, self.shape, self.kind, self.blocks)

    @property
    def numel(self) -> int:
        """The number of elements; a complex element counts once."""
        return math.prod(self.shape)

    @property
    def bounds(self) -> list[int]:
        """The elements at which a per_matrix parameter can be cut: 0, and the end of each block."""
        return [0, self.numel] if self.blocks is None else self.blocks.bounds(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec(ParameterSpec):
    """Block of a parameter: a matrix that is stepped alone.

    Args:
        parameter: the parameter of the block. Both have the same path.

    Example::

        >>> thirds = MatrixBlocks(row_blocks=3)
        >>> whole = ParameterSpec("qkv", (12, 4), kind="per_matrix", blocks=thirds)
        >>> BlockSpec("qkv", (4, 4), kind="per_matrix", parameter=whole).numel
        16
    """

    parameter: ParameterSpec


@lru_cache(maxsize=64)
def _is_device(name: str) -> bool:
    """Return True for a device of torch, and for a type with a number, such as "cuda 1"."""
    kind, space, number = name.partition(" ")
    if space and not (number.isdecimal() and number.isascii() and ":" not in kind):
        return False
    try:
        torch.device(kind)
    except RuntimeError:
        return False
    return True


def _check_blocks(path: str, shape: tuple[int, ...], kind: Kind, blocks: Any) -> None:
    if not isinstance(blocks, MatrixBlocks):
        raise TypeError(
            f"blocks of {path!r} must be MatrixBlocks or None, got {format_value(blocks)}"
        )
    if kind != "per_matrix":
        raise ValueError(
            f"{path!r} has blocks, and its kind is {kind!r}; only a per_matrix parameter is "
            "divided into matrices: give kind='per_matrix'"
        )
    blocks.check(repr(path), shape)


def _check_shape(path: Any, shape: Any) -> tuple[int, ...]:
    """Check a path and a shape, and return the shape as a tuple."""
    if not isinstance(path, str):
        raise TypeError(f"path must be a string, got {path!r}")
    if not path:
        raise ValueError("path must have at least one character, got ''")
    try:
        sizes: tuple[Any, ...] = tuple(shape)
    except TypeError:
        raise TypeError(f"shape of {path!r} must be a tuple of sizes, got {shape!r}") from None
    for size in sizes:
        if type(size) is not int:
            raise TypeError(f"shape of {path!r} must be whole numbers, got {sizes!r}")
        if size < 0:
            raise ValueError(f"shape of {path!r} must be sizes >= 0, got {sizes!r}")
    if math.prod(sizes) > MOST_ELEMENTS:
        raise ValueError(f"shape of {path!r} has more elements than a tensor can have: {sizes!r}")
    return sizes


def kind_of(optimizer: Any) -> Kind:
    """Return "per_matrix" if an Optimizer has a stage that needs whole tensors, else "pointwise".

    For other objects, such as a function that returns optimizers, return "pointwise".
    """
    stages = optimizer.stages if isinstance(optimizer, Optimizer) else ()
    return "pointwise" if all(stage.kind == "pointwise" for stage in stages) else "per_matrix"


Specs = tuple[ParameterSpec, ...]
"""The parameters of a model, in order."""


def check_specs(specs: Specs) -> None:
    """Check that all entries are specs, and that their paths differ."""
    seen: dict[str, int] = {}
    for place, spec in enumerate(specs):
        if not isinstance(spec, ParameterSpec):
            raise TypeError(f"entry {place} must be a ParameterSpec, got {format_value(spec)}")
        if spec.path in seen:
            raise ValueError(
                f"two specs, {seen[spec.path]} and {place}, have the path {spec.path!r}; each "
                "parameter needs its own path"
            )
        seen[spec.path] = place
