"""Inputs of an exported step: their order, their entries in the manifest, and checks of tensors.

Complex tensors are described by their real views, which the program gets.
"""

import math
import platform
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch.compilers import fake_tensor_mode
from functional_optim.core.hyper_inputs import InputHypers, fill_inputs
from functional_optim.core.links import stage_labels
from functional_optim.core.stage import Stage
from functional_optim.core.state import map_state, state_tensors
from functional_optim.core.state_init import init_leaf
from functional_optim.core.views import real_view
from functional_optim.version import installed_version

INPUT_LISTS = ("params", "grads", "states", "steps", "hyper")
"""The arguments of a program. Each is a list of tensors."""


class Entry(NamedTuple):
    """Input of an exported program."""

    list: str
    """The list of :data:`INPUT_LISTS` with this input."""
    name: str
    shape: tuple[int | str, ...]
    """Sizes; a name stands for a dynamic size."""
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    complex: bool = False
    """True for the real view of a complex tensor, with a last dimension of 2."""
    initial: float | None = None
    """For a state, the value of all its elements before the first step; None if they differ."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the manifest."""
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
            made["initial"] = None if self.initial is None else to_json_number(self.initial)
        return made


def to_json_number(value: Any) -> Any:
    """Return a number for JSON: a string that ``float`` parses if it is not finite."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def build_entry(list_name: str, name: str, tensor: Tensor, **more: Any) -> Entry:
    view = real_view(tensor)
    layout = tuple(view.shape), tuple(view.stride()), view.dtype, view.device
    return Entry(list_name, name, *layout, tensor.is_complex(), **more)


class LeafEntries(NamedTuple):
    """The inputs of one leaf, and the structure of its state."""

    param: Entry
    grad: Entry
    states: tuple[Entry, ...]
    step: Entry
    state: tuple[Any, ...]
    """One State per stage, of real meta tensors."""


def leaf_entries(
    stages: Sequence[Stage], hypers: InputHypers, param: Tensor, name: str, *, dynamic: str = ""
) -> LeafEntries:
    """Return the inputs of the program for one parameter.

    ``dynamic`` is a name for the length of a one-dimensional parameter; empty for fixed shapes.
    """
    made = _leaf_entries(stages, fill_inputs(hypers, lambda slot: slot.value), param.detach(), name)
    if not dynamic:
        return made
    if param.dim() != 1 or param.numel() < 2:
        raise ValueError(
            f"dynamic=True is for parameters of one dimension, of 2 elements and more; {name!r} "
            f"has shape {tuple(param.shape)}: flatten it (reshape(-1)), or export for its shape"
        )
    param_entry, grad_entry, *states = (
        _with_free_length(entry, made.param.shape, dynamic)
        for entry in (made.param, made.grad, *made.states)
    )
    return made._replace(param=param_entry, grad=grad_entry, states=tuple(states))


def _with_free_length(entry: Entry, shape: tuple[int | str, ...], length: str) -> Entry:
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
        # A state that depends on the parameter differs for a parameter of NaNs.
        other_start = init_leaf(stages, hypers, torch.full_like(param, math.nan))
    entries = []
    for label, one, other in zip(
        stage_labels(stages), start.stages, other_start.stages, strict=True
    ):
        tensors = zip(state_tensors([one]), state_tensors([other]), strict=True)
        for field, (tensor, twin) in zip(_field_names(one), tensors, strict=True):
            value = _constant(tensor)
            initial = value if repr(value) == repr(_constant(twin)) else None
            field_name = f"{name}.{label}.{field}"
            entries.append(build_entry("states", field_name, tensor, initial=initial))
    return LeafEntries(
        build_entry("params", name, param),
        build_entry("grads", name, torch.empty_like(param, device="meta"))._replace(
            device=param.device
        ),
        tuple(entries),
        build_entry("steps", name, start.step),
        tuple(map_state(lambda t: real_view(t).to("meta"), state) for state in start.stages),
    )


def _field_names(state: Any) -> list[str]:
    names: list[str] = []
    for field, value in zip(getattr(state, "_fields", ()), state, strict=True):
        many = isinstance(value, list)
        names += [f"{field}[{k}]" for k in range(len(value))] if many else [field]
    return names


def _constant(tensor: Tensor) -> float | None:
    """Return the value of every element, including the sign of zero; None if elements differ."""
    flat = real_view(tensor).reshape(-1)
    if flat.numel() == 0:
        return 0.0
    value: float = flat[0].item()
    alike = bool((flat == flat[0]).all()) and bool((flat.signbit() == flat[0].signbit()).all())
    return value if alike else None


def order_entries(leaves: Sequence[LeafEntries], inputs: Sequence[str]) -> tuple[Entry, ...]:
    """Return the inputs of a program, in the order of its flattened lists."""
    cpu = torch.device("cpu")
    return (
        *(leaf.param for leaf in leaves),
        *(leaf.grad for leaf in leaves),
        *(entry for leaf in leaves for entry in leaf.states),
        *(leaf.step for leaf in leaves),
        *(Entry("hyper", name, (), (), torch.float64, cpu) for name in inputs),
    )


def example_inputs(entries: Sequence[Entry]) -> tuple[tuple[list[Tensor], ...], Any]:
    """Return arguments to trace with, and their dynamic sizes (None if all sizes are fixed)."""
    names = dict.fromkeys(length for entry in entries if (length := _free_length(entry)))
    # Different sizes, because torch.export would unify equal sizes.
    sizes = {name: 64 + i for i, name in enumerate(names)}
    with nullcontext() if sizes else fake_tensor_mode():  # fake tensors have no memory
        made = tuple(
            [_example_tensor(e, sizes) for e in entries if e.list == name] for name in INPUT_LISTS
        )
    if not sizes:
        return made, None
    dims = {name: torch.export.Dim(name, min=2) for name in sizes}
    shapes = [
        [{0: dims[size]} if (size := _free_length(e)) else {} for e in entries if e.list == name]
        for name in INPUT_LISTS
    ]
    return made, shapes


def _free_length(entry: Entry) -> str | None:
    """Return the name of the dynamic length; None if the length is fixed."""
    return next((size for size in entry.shape if isinstance(size, str)), None)


def _example_tensor(entry: Entry, sizes: Mapping[str, int]) -> Tensor:
    shape = [sizes[size] if isinstance(size, str) else size for size in entry.shape]
    return torch.empty_strided(shape, entry.stride, dtype=entry.dtype, device=entry.device)


def build_manifest(
    entries: Sequence[Entry],
    inputs: Mapping[str, float],
    fixed: Mapping[str, Any],
    **facts: Any,
) -> dict[str, Any]:
    """Return the manifest: everything that a caller of the program must know.

    ``inputs`` has the values of input numbers at export, ``fixed`` the numbers and choices that are
    fixed in the program, and ``facts`` more entries.
    """
    return {
        **facts,
        "call": f"step({', '.join(INPUT_LISTS)})",
        "inputs": [entry.to_json() for entry in entries],
        "hyper": {name: to_json_number(value) for name, value in inputs.items()},
        "fixed": {name: to_json_number(value) for name, value in fixed.items()},
        "versions": {
            "functional_optim": installed_version(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    }


def check_tensor(entry: Entry, tensor: Any) -> None:
    """Check that the program takes a tensor as this input."""
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
    ):
        if not fits:
            raise ValueError(
                f"{where} has {what} {got}, the program was exported for {want}: convert the "
                "tensor, or export a program for it"
            )
