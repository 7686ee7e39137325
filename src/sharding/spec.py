"""ParameterSpec: what a plan has to know of a parameter. No tensor, no process group."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from functional_optim import Optimizer
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

    Raises:
        TypeError: a path that is no string, a size that is no whole number, a dtype that is none, a
            ``requires_grad`` that is no bool.
        ValueError: an empty path, a negative size or group, more elements than a tensor can have,
            an unknown kind, a device that torch does not know.

    Example::

        >>> import torch
        >>> ParameterSpec("layer.weight", (3, 4), torch.bfloat16).numel
        12
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    requires_grad: bool = True
    kind: Kind = "pointwise"
    group: int = 0

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

    @property
    def numel(self) -> int:
        """The number of elements; a complex one counts once."""
        return math.prod(self.shape)


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
    """Return True if a chain can be run on any range of elements, or has a stage that cannot.

    "pointwise" also for what is no single optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        return "pointwise"
    cut = all(stage.kind == "pointwise" for stage in optimizer.stages)
    return "pointwise" if cut else "per_matrix"


def specs_of(model: Any, kind: Kind = "pointwise") -> "Specs":
    """The specs of a model's parameters, in its order.

    Where all parameters are on one device, it stands in the specs without its index, so that
    every rank has the same specs.

    Args:
        model: a module (its parameters may be on the meta device), or tensors by name.
        kind: what the rule that will step them declares; see :class:`ParameterSpec`.

    Returns:
        One :class:`ParameterSpec` for each parameter; a tied one stands once, under its first
        name.

    Raises:
        TypeError: ``model`` is neither.

    Example::

        >>> import torch
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(2, 3)
        >>> [(spec.path, spec.shape) for spec in specs_of(model)]
        [('weight', (3, 2)), ('bias', (3,))]
    """
    if isinstance(model, nn.Module):
        named: dict[str, Tensor] = dict(model.named_parameters())
    elif isinstance(model, Mapping) and all(isinstance(one, Tensor) for one in model.values()):
        named = dict(model)
    else:
        raise TypeError(
            "specs are made of a torch.nn.Module or a mapping of names to tensors, got "
            f"{type(model).__name__}"
        )
    devices = {param.device for param in named.values()}
    one_device = len(devices) == 1
    return tuple(
        ParameterSpec(
            path,
            tuple(param.shape),
            param.dtype,
            param.device.type if one_device else str(param.device),
            param.requires_grad,
            kind,
        )
        for path, param in named.items()
    )


Specs = tuple[ParameterSpec, ...]
"""The parameters of a model, in order."""


def as_specs(given: Any, kind: Kind = "pointwise") -> "Specs":
    """The specs that a caller gave, or those of the model given.

    Raises:
        TypeError: what was given is no model and no iterable of specs.
        ValueError: a path that stands twice.
    """
    if isinstance(given, (nn.Module, Mapping)):
        return specs_of(given, kind)
    if not isinstance(given, Iterable):
        raise TypeError(
            "a plan is made for a torch.nn.Module, a mapping of names to tensors, or an iterable "
            f"of ParameterSpec, got {type(given).__name__}"
        )
    specs = tuple(given)
    check_specs(specs)
    return specs


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
