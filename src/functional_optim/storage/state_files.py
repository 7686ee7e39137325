"""State in memory-mapped files. It can be larger than memory, and later processes can open it."""

import contextlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.chain import require_one_chain
from functional_optim.core.state import LeafState, State, field_tensors, map_state, state_tensors
from functional_optim.core.state_init import init_leaf
from functional_optim.core.tree import path_name
from functional_optim.optimizer import Optimizer
from functional_optim.plan.tree import params_of

MANIFEST = "manifest.json"
_DRAFT = f"{MANIFEST}.draft"
_VERSION = 1
_STEP = "step"


class _TensorRecord(NamedTuple):
    """File, offset, shape and strides of a tensor of the state, as written to the manifest."""

    file: str
    dtype: str
    offset: int
    """In elements."""
    shape: list[int]
    stride: list[int]


def mapped_state(optimizer: Optimizer, params: Any, directory: str | os.PathLike[str]) -> State:
    """Return the state of an optimizer in files that are mapped into memory.

    Each field of each stage has one file, with all leaves in it. A manifest lists paths, shapes and
    dtypes. The first call creates the files, writes the state of ``init``, and reserves their disk
    space. A later call, in this process or another, opens these files, step counts included.

    ``update_`` steps the state in place, and the operating system reads and writes pages as memory
    allows. (``update`` returns a new state, in ordinary memory.) If a step is interrupted, or two
    processes step at once, the state is partly old and partly new. The system may write to the disk
    some time after the step.

    Args:
        optimizer: any; best with a storage, see :func:`~functional_optim.storage.stored`.
        params: a pytree of parameters. If they are not on the CPU, keep the state there with
            ``stored(..., state_device="cpu")``.
        directory: of the files. It is created if it does not exist, and must contain nothing else.

    Returns:
        A :class:`~functional_optim.State`, for ``update_``.

    Raises:
        OSError: the disk has no space for the files. All of them are removed. (On a file system
            that compresses or copies on write, space may still run out later.)
        TypeError: a leaf that is not a tensor.
        ValueError: params that ``init`` refuses; two leaves with the same path; files of another
            optimizer or tree (the error names the first difference), or truncated or missing files;
            state that is not on the CPU.

    Example::

        >>> import tempfile, torch
        >>> from functional_optim import adamw
        >>> params, optimizer = {"w": torch.ones(3)}, adamw(lr=0.1)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     state = mapped_state(optimizer, params, directory)
        ...     optimizer.update_(params, {"w": torch.ones(3)}, state)
        ...     again = mapped_state(optimizer, params, directory)
        >>> int(again.leaves["w"].step), bool((again.leaves["w"].stages[-1].exp_avg > 0).all())
        (1, True)
    """
    require_one_chain(optimizer, "mapped_state")
    leaves, spec, paths = params_of(optimizer, params)
    names = [path_name(path) for path in paths]
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(
                f"{count} leaves of params have the path {name!r}, since a key contains a dot, and "
                "files list leaves by their paths: rename the key"
            )
    named = {name: leaf for name, leaf in zip(names, leaves, strict=True) if leaf is not None}
    hypers = dict(zip(names, optimizer.hypers_for(params), strict=True))
    _require_cpu(optimizer, named)
    with torch.no_grad():
        shadows = {
            name: init_leaf(optimizer.stages, hypers[name], torch.empty_like(leaf, device="meta"))
            for name, leaf in named.items()
        }
    plan, sizes = _plan_files(optimizer, shadows)
    folder = Path(directory)
    manifest = {"version": _VERSION, "leaves": plan, "files": sizes}
    is_new = not (folder / MANIFEST).exists()
    with _new_files(folder, sizes) if is_new else contextlib.nullcontext():
        if not is_new:
            _check_files(folder, manifest)
        files = {name: _map_file(folder / name, *size) for name, size in sizes.items()}
        states = {name: _view_state(one, plan[name], files) for name, one in shadows.items()}
        if is_new:
            with torch.no_grad():
                for name, leaf in named.items():
                    start = init_leaf(optimizer.stages, hypers[name], leaf)
                    _write_nonzeros(states[name], start)
            # The manifest is written last, and atomically: if it exists, the files are complete.
            draft = folder / _DRAFT
            draft.write_text(json.dumps(manifest, indent=1))
            draft.replace(folder / MANIFEST)
    return State(spec.unflatten(map(states.get, names)))


def _require_cpu(optimizer: Optimizer, leaves: Mapping[str, Tensor]) -> None:
    for name, leaf in leaves.items():
        for stage in optimizer.stages:
            if stage.stateful and leaf.device.type != "cpu" and stage.state_device != "cpu":
                raise ValueError(
                    f"the parameter at {name!r} is on {leaf.device}, and {stage.name} keeps its "
                    "state there; files are mapped into the CPU's memory: use "
                    "stored(..., state_device='cpu')"
                )


def _tensors(state: LeafState) -> list[Tensor]:
    return [state.step, *state_tensors(state.stages)]


def _plan_files(
    optimizer: Optimizer, shadows: Mapping[str, LeafState]
) -> tuple[dict[str, list[_TensorRecord]], dict[str, tuple[str, int]]]:
    """Return the records of each leaf, the step count first, and dtype and length of each file."""
    ends: dict[str, tuple[str, int]] = {}
    plan: dict[str, list[_TensorRecord]] = {}

    def append(field: str, tensor: Tensor) -> _TensorRecord:
        dtype = str(tensor.dtype)[6:]
        file = f"{field}.{dtype}.bin"
        start = ends.get(file, (dtype, 0))[1]
        ends[file] = (dtype, start + tensor.numel())
        # Dense, with the order of strides that init gives: rounding depends on the layout.
        stride = torch.empty_like(tensor, device="meta").stride()
        return _TensorRecord(file, dtype, start, list(tensor.shape), list(stride))

    for name, shadow in shadows.items():
        plan[name] = [append(_STEP, shadow.step)]
        for index, one in enumerate(shadow.stages):
            for field, value in zip(getattr(one, "_fields", ()), one, strict=True):
                label = f"{index}-{optimizer.stages[index].name}.{field}"
                for tensor in field_tensors(value):
                    plan[name].append(append(label, tensor))
    return plan, ends


@contextlib.contextmanager
def _new_files(folder: Path, sizes: dict[str, tuple[str, int]]) -> Iterator[None]:
    """Create files of zeros with reserved disk space. Remove them if the body raises."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    there = sorted(entry.name for entry in folder.iterdir())
    if there:
        raise ValueError(
            f"{folder} holds {there[0]!r} but no {MANIFEST}: it is of something else, or its "
            "making was cut short; empty it, or choose another directory"
        )
    try:
        for name, (dtype, length) in sizes.items():
            with (folder / name).open("xb") as file:
                _reserve(file, length * getattr(torch, dtype).itemsize)
        yield
    except BaseException as error:
        for name in (*sizes, _DRAFT):
            (folder / name).unlink(missing_ok=True)
        free = shutil.disk_usage(folder).free
        if is_new:
            folder.rmdir()
        if isinstance(error, OSError):
            total = sum(length * getattr(torch, dtype).itemsize for dtype, length in sizes.values())
            raise OSError(
                error.errno,
                f"{error.strerror or error}: the state takes {total} bytes, and {free} are free "
                "there; make room, choose another directory, or keep the state in fewer bits "
                "(stored(..., state='int8'))",
                str(folder),
            ) from error
        raise


def _reserve(file: BinaryIO, nbytes: int) -> None:
    """Reserve disk space for a file. Bytes that were not written are zeros.

    A write to a hole in a mapped file allocates disk space. If the disk is full, the system kills
    the process.
    """
    if nbytes == 0:
        return
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return
    zeros = bytes(1 << 20)
    file.writelines(
        zeros[: nbytes - begin]
        for begin in range(os.fstat(file.fileno()).st_size, nbytes, len(zeros))
    )


def _check_files(folder: Path, wanted: dict[str, Any]) -> None:
    """Check that the manifest equals ``wanted``, and that the files have the lengths it lists."""
    found = json.loads((folder / MANIFEST).read_text())
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        raise ValueError(
            f"{folder / MANIFEST} is not of version {_VERSION}, the only version that this package "
            "reads; choose another directory"
        )
    expected = json.loads(json.dumps(wanted))
    only_one_has = expected["leaves"].keys() ^ found["leaves"].keys()
    for name in [*sorted(only_one_has), *expected["leaves"]]:
        mine, theirs = expected["leaves"].get(name), found["leaves"].get(name)
        if mine != theirs:
            raise ValueError(
                f"{folder} holds the state of another tree or optimizer: at {name!r} it has "
                f"{_format(theirs)}, wanted is {_format(mine)}; open it with the optimizer and "
                "params that it was made with, or choose another directory"
            )
    if found != expected:
        raise ValueError(
            f"{folder / MANIFEST} has been changed: its list of files differs; restore it, or "
            "choose another directory"
        )
    for name, (dtype, length) in expected["files"].items():
        size = length * getattr(torch, dtype).itemsize
        file = folder / name
        has = file.stat().st_size if file.exists() else None
        if has != size:
            raise ValueError(
                f"{file} has {'no' if has is None else has} bytes where {size} are expected: it is "
                "damaged; restore it, or start from init in another directory"
            )
        with file.open("r+b") as opened:  # a copy of the file may have holes
            _reserve(opened, size)


def _format(records: list[list[Any]] | None) -> str:
    if records is None:
        return "nothing"
    return ", ".join(f"{file} {tuple(shape)}" for file, _, _, shape, _ in records[1:]) or "no state"


def _map_file(file: Path, dtype: str, length: int) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if length == 0:  # an empty file cannot be mapped
        return torch.empty(0, dtype=kind, device="cpu")
    return torch.from_file(str(file), shared=True, size=length, dtype=kind, device="cpu")


def _view_state(
    shadow: LeafState, records: Sequence[_TensorRecord], files: dict[str, Tensor]
) -> LeafState:
    """Return the state of a leaf as views of the files."""
    left = iter(files[one.file].as_strided(one.shape, one.stride, one.offset) for one in records)
    step = next(left)
    return LeafState(step, tuple(map_state(lambda _: next(left), one) for one in shadow.stages))


def _write_nonzeros(state: LeafState, start: LeafState) -> None:
    """Write the initial state. Tensors of zeros are not written, since new files are zeros."""
    for view, tensor in zip(_tensors(state), _tensors(start), strict=True):
        # Compare bits, since a buffer may start from minus zero.
        if bool(tensor.reshape(-1).view(torch.uint8).any()):
            view.copy_(tensor)
