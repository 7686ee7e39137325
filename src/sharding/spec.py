"""ParameterSpec: what a plan has to know of a parameter. No tensor, no process group."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from functional_optim import Optimizer
from functional_optim.core.blocks import MatrixBlocks
from functional_optim.core.brief import brief
from functional_optim.core.stage import Kind

MOST_ELEMENTS = 2**63 - 1
KINDS: tuple[Kind, ...] = ("pointwise", "per_matrix")


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter as a planner sees it: its name, its size, and whether it may be cut.

    Args:
        path: its name, unique in a plan; as ``module.named_parameters()`` has it.
        shape: its shape; ``()`` for a 0-d parameter.
        dtype: its dtype, which is also that of its gradient.
        device: where it lives. Devices with an index differ between ranks, so a plan that is
            compared across ranks has the type alone ("cuda").
        requires_grad: whether it is trained. A frozen parameter has an owner, but neither
            gradient nor state.
        kind: "pointwise" (its rule may be run on any range of its elements) or "per_matrix"
            (the rule needs the whole tensor, so one rank owns it whole).
        group: index of its parameter group.
        blocks: of a per_matrix parameter: the matrices that it consists of, such as heads or
            experts. Each is planned as a parameter of its own, and stepped alone. None for one.

    Raises:
        TypeError: a path that is no string, a size that is no whole number, a dtype that is none, a
            ``requires_grad`` that is no bool, blocks that are no :class:`~sharding.MatrixBlocks`.
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
        """Refuse what no parameter has."""
        _check_path(self.path)
        if type(self.shape) is not tuple:
            object.__setattr__(self, "shape", _shape(self.path, self.shape))
        _check_shape(self.path, self.shape)
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
        """The number of elements; a complex one counts once."""
        return math.prod(self.shape)

    @property
    def bounds(self) -> list[int]:
        """The elements at which it may be cut if it is per_matrix: those of its blocks' ends."""
        return [0, self.numel] if self.blocks is None else self.blocks.bounds(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec(ParameterSpec):
    """A block of a parameter as a planner sees it: a matrix that is stepped alone.

    Args:
        parameter: the parameter whose path the block has.

    Example::

        >>> thirds = MatrixBlocks(row_blocks=3)
        >>> whole = ParameterSpec("qkv", (12, 4), kind="per_matrix", blocks=thirds)
        >>> BlockSpec("qkv", (4, 4), kind="per_matrix", parameter=whole).numel
        16
    """

    parameter: ParameterSpec


@lru_cache(maxsize=64)
def _is_device(name: str) -> bool:
    """Return True if torch has a device of this name, or a number follows after its type."""
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
        raise TypeError(f"blocks of {path!r} must be MatrixBlocks or None, got {brief(blocks)}")
    if kind != "per_matrix":
        raise ValueError(
            f"{path!r} has blocks, and its kind is {kind!r}; only a per_matrix parameter is "
            "divided into matrices: give kind='per_matrix'"
        )
    blocks.check(repr(path), shape)


def _check_path(path: Any) -> None:
    if not isinstance(path, str):
        raise TypeError(f"path must be a string, got {path!r}")
    if not path:
        raise ValueError("path must have at least one character, got ''")


def _check_shape(path: str, shape: tuple[Any, ...]) -> None:
    for size in shape:
        if type(size) is not int:
            raise TypeError(f"shape of {path!r} must be whole numbers, got {shape!r}")
        if size < 0:
            raise ValueError(f"shape of {path!r} must be sizes >= 0, got {shape!r}")
    if math.prod(shape) > MOST_ELEMENTS:
        raise ValueError(f"shape of {path!r} has more elements than a tensor can have: {shape!r}")


def _shape(path: str, shape: Any) -> tuple[int, ...]:
    try:
        return tuple(shape)
    except TypeError:
        raise TypeError(f"shape of {path!r} must be a tuple of sizes, got {shape!r}") from None


def kind_of(optimizer: Any) -> Kind:
    """Return "per_matrix" if a chain has a stage that needs whole tensors, else "pointwise".

    "pointwise" also for what is no single optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        return "pointwise"
    cut = all(stage.kind == "pointwise" for stage in optimizer.stages)
    return "pointwise" if cut else "per_matrix"


Specs = tuple[ParameterSpec, ...]
"""The parameters of a model, in order."""


def check_specs(specs: Specs) -> None:
    """Specs, and each path once.

    Raises:
        TypeError: an entry that is no spec.
        ValueError: a path that stands twice.
    """
    for place, spec in enumerate(specs):
        if not isinstance(spec, ParameterSpec):
            raise TypeError(f"entry {place} must be a ParameterSpec, got {brief(spec)}")
    if len({spec.path for spec in specs}) == len(specs):
        return
    seen: dict[str, int] = {}
    for place, spec in enumerate(specs):
        if spec.path in seen:
            raise ValueError(
                f"the path {spec.path!r} stands twice, at places {seen[spec.path]} and {place}; "
                "each parameter needs a name of its own"
            )
        seen[spec.path] = place
