"""Inputs of an exported step in order: written beside the program, and checked against.

Leaves are seen as the program sees them: a complex tensor as its real view.
"""

import math
import platform
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch import fake_tensor_mode
from functional_optim.core.initial import init_leaf
from functional_optim.core.links import stage_labels
from functional_optim.core.slots import Slotted, filled
from functional_optim.core.stage import Stage
from functional_optim.core.state import map_state, state_tensors
from functional_optim.core.views import real_view

LISTS = ("params", "grads", "states", "steps", "hyper")
"""The arguments of a program, each a list of tensors."""


class Entry(NamedTuple):
    """Input of the program."""

    list: str
    """Which of :data:`LISTS` it is in."""
    name: str
    shape: tuple[int | str, ...]
    """Sizes; a name for one that is free."""
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    complex: bool = False
    """Whether it is the real view of a complex tensor, with a last dimension of 2."""
    initial: float | None = None
    """Of a state: what each of its elements is before the first step; None if they differ."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry as the manifest has it."""
        made: dict[str, Any] = {
            "list": self.list,
            "name": self.name,
            "shape": list(self.shape),
            "stride": list(self.stride),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
        }
        if self.complex:
            made["complex"] = True
        if self.list == "states":
            made["initial"] = None if self.initial is None else plain(self.initial)
        return made


def plain(value: Any) -> Any:
    """A number as JSON has it: one that is not finite as text that ``float`` reads."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def entry_of(where: str, name: str, tensor: Tensor, **more: Any) -> Entry:
    """The entry of a tensor."""
    seen = real_view(tensor)
    return Entry(
        where,
        name,
        tuple(seen.shape),
        tuple(seen.stride()),
        seen.dtype,
        seen.device,
        tensor.is_complex(),
        **more,
    )


class LeafEntries(NamedTuple):
    """The inputs that belong to a leaf, and the shape of its state."""

    param: Entry
    grad: Entry
    states: tuple[Entry, ...]
    step: Entry
    state: tuple[Any, ...]
    """One State per stage, of real tensors without memory."""


def leaf_entries(
    stages: Sequence[Stage], hypers: Slotted, param: Tensor, name: str, *, dynamic: str = ""
) -> LeafEntries:
    """Return the inputs of the program for one parameter.

    Args:
        stages: of the chain.
        hypers: of this leaf.
        param: the parameter.
        name: of the leaf.
        dynamic: a name for the length of a parameter of one dimension, if that is to be free.

    Raises:
        ValueError: a free length where there is none.
    """
    made = _leaf_entries(stages, filled(hypers, lambda slot: slot.value), param.detach(), name)
    if not dynamic:
        return made
    if param.dim() != 1 or param.numel() < 2:
        raise ValueError(
            f"dynamic=True is for parameters of one dimension, of 2 elements and more; {name!r} "
            f"has shape {tuple(param.shape)}: flatten it (reshape(-1)), or export for its shape"
        )
    freed = [_freed(entry, made.param.shape, dynamic) for entry in made[2]]
    param_entry, grad_entry = (_freed(entry, made.param.shape, dynamic) for entry in made[:2])
    return made._replace(param=param_entry, grad=grad_entry, states=tuple(freed))


def _freed(entry: Entry, shape: tuple[int | str, ...], length: str) -> Entry:
    if entry.shape == ():
        return entry
    if entry.shape != shape:
        raise ValueError(
            f"dynamic=True needs states of the parameter's shape {shape} (or 0-d), and "
            f"{entry.name} has shape {entry.shape}: export for one shape"
        )
    return entry._replace(shape=(length, *entry.shape[1:]))


def _leaf_entries(
    stages: Sequence[Stage], hypers: Sequence[Any], param: Tensor, name: str
) -> LeafEntries:
    with torch.no_grad():
        start = init_leaf(stages, hypers, param)
        elsewhere = init_leaf(stages, hypers, torch.full_like(param, math.nan))
    labels = stage_labels(stages)
    entries = []
    for label, one, other in zip(labels, start.stages, elsewhere.stages, strict=True):
        for field, tensor, twin in zip(
            _field_names(one), state_tensors([one]), state_tensors([other]), strict=True
        ):
            first, second = _constant(tensor), _constant(twin)
            same = first is not None and second is not None and repr(first) == repr(second)
            entries.append(
                entry_of(
                    "states", f"{name}.{label}.{field}", tensor, initial=first if same else None
                )
            )
    return LeafEntries(
        entry_of("params", name, param),
        entry_of("grads", name, torch.empty_like(param, device="meta"))._replace(
            device=param.device
        ),
        tuple(entries),
        entry_of("steps", name, start.step),
        tuple(map_state(lambda t: real_view(t).to("meta"), state) for state in start.stages),
    )


def _field_names(state: Any) -> list[str]:
    names: list[str] = []
    for field, value in zip(getattr(state, "_fields", ()), state, strict=True):
        many = isinstance(value, list)
        names += [f"{field}[{k}]" for k in range(len(value))] if many else [field]
    return names


def _constant(tensor: Tensor) -> float | None:
    """The number that every element is, down to the sign of a zero; None if there is none."""
    flat = real_view(tensor).reshape(-1)
    if flat.numel() == 0:
        return 0.0
    value: float = flat[0].item()
    alike = bool((flat == flat[0]).all()) and bool((flat.signbit() == flat[0].signbit()).all())
    return value if alike else None


def in_lists(leaves: Sequence[LeafEntries], inputs: Sequence[str]) -> tuple[Entry, ...]:
    """The inputs of a program, in the order of its flattened lists."""
    cpu = torch.device("cpu")
    return (
        *(leaf.param for leaf in leaves),
        *(leaf.grad for leaf in leaves),
        *(entry for leaf in leaves for entry in leaf.states),
        *(leaf.step for leaf in leaves),
        *(Entry("hyper", name, (), (), torch.float64, cpu) for name in inputs),
    )


def examples(entries: Sequence[Entry]) -> tuple[tuple[list[Tensor], ...], Any]:
    """Arguments to trace with, and their dynamic sizes (None: all are fixed)."""
    names = dict.fromkeys(length for entry in entries if (length := _free(entry)))
    # Different sizes, so that no two are taken to be the same.
    sizes = {name: 64 + i for i, name in enumerate(names)}
    with nullcontext() if sizes else fake_tensor_mode():  # without memory, where that is possible
        made = tuple([_example(e, sizes) for e in entries if e.list == name] for name in LISTS)
    if not sizes:
        return made, None
    dims = {name: torch.export.Dim(name, min=2) for name in sizes}
    shapes = [
        [{0: dims[size]} if (size := _free(e)) else {} for e in entries if e.list == name]
        for name in LISTS
    ]
    return made, shapes


def _free(entry: Entry) -> str | None:
    """The name of its length, if that is free."""
    return next((size for size in entry.shape if isinstance(size, str)), None)


def _example(entry: Entry, sizes: Mapping[str, int]) -> Tensor:
    shape = [sizes[size] if isinstance(size, str) else size for size in entry.shape]
    return torch.empty_strided(shape, entry.stride, dtype=entry.dtype, device=entry.device)


def manifest(
    entries: Sequence[Entry],
    inputs: Mapping[str, float],
    fixed: Mapping[str, Any],
    **facts: Any,
) -> dict[str, Any]:
    """Everything that one has to know to call the program.

    Args:
        entries: of all inputs, in the order of the flattened lists.
        inputs: the numbers that are fed, and their values at export.
        fixed: the numbers and choices that are not.
        facts: more of it.
    """
    return {
        **facts,
        "call": f"step({', '.join(LISTS)})",
        "inputs": [entry.to_json() for entry in entries],
        "hyper": {name: plain(value) for name, value in inputs.items()},
        "fixed": {name: plain(value) for name, value in fixed.items()},
        "versions": {
            "functional_optim": _own_version(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    }


def _own_version() -> str:
    try:
        return version("functional-optim")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


def require_fits(entry: Entry, tensor: Any, *, strides: bool) -> None:
    """A tensor that the program takes at this place.

    Args:
        entry: of the place.
        tensor: what is given there.
        strides: whether they count: a compiled program reads memory by those it was made for.

    Raises:
        TypeError: no tensor.
        ValueError: another shape, dtype, device or layout.
    """
    where = f"{entry.list}: {entry.name}"
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{where} must be a tensor, got {type(tensor).__name__}: the program steps every leaf "
            "that it was exported with; leave out a leaf by exporting with None in its place"
        )
    sizes = zip(tensor.shape, entry.shape, strict=False)
    shape_fits = tensor.dim() == len(entry.shape) and all(
        isinstance(want, str) or got == want for got, want in sizes
    )
    for what, fits, got, want in (
        ("shape", shape_fits, tuple(tensor.shape), entry.shape),
        ("dtype", tensor.dtype == entry.dtype, tensor.dtype, entry.dtype),
        ("device", tensor.device == entry.device, tensor.device, entry.device),
        ("strides", not strides or _laid(entry, tensor), tensor.stride(), entry.stride),
    ):
        if not fits:
            raise ValueError(f"{where} has {what} {got}, the program was exported for {want}")


def _laid(entry: Entry, tensor: Tensor) -> bool:
    """Return True if the strides that mean anything are those of the entry."""
    strides = zip(tensor.shape, tensor.stride(), entry.stride, strict=True)
    return all(size < 2 or got == want for size, got, want in strides)
