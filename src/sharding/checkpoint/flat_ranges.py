"""FlatRanges: some elements of a tensor, in a form that ``torch.distributed.checkpoint`` saves."""

from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from functional_optim._torch.tensors import to_copy, wrapper_tensor
from sharding.checkpoint.boxes import Box, boxes_of

_COPIES = frozenset({torch.ops.aten.clone.default, torch.ops.aten.detach.default, to_copy})
"""Operators that are applied to each range."""
_WAY_OUT = (
    "save and load it with torch.distributed.checkpoint, or call consolidate_state_dict() on all "
    "ranks before state_dict() for whole tensors"
)


class FlatRanges(Tensor):
    """Tensor of which this process has ranges of elements, counted in row-major order.

    ``torch.distributed.checkpoint`` saves and loads these elements like those of a DTensor: the
    class implements the protocol of ``torch.distributed._checkpointable``. Other processes have the
    remaining elements; an element of several processes is written by one of them. A FlatRanges can
    be copied, detached and moved to another device, as ``async_save`` does. All other operators and
    pickling are refused, because elements would be missing from the result.

    Loading writes to new memory, and never to the given ranges. So a checkpoint that cannot be read
    completely changes nothing.

    Args:
        shape: of the whole tensor.
        ranges: tensors of one dimension, by the index of their first element. Memory is shared.
        dtype: of the elements.
        device: of the elements.
        origin: name of the plan and rank of the ranges, which is compared at a load.

    Attributes:
        ranges: the argument.
        origin: the argument.
        loaded: the ranges that were loaded; None before a load.

    Example::

        >>> ranges = FlatRanges((2, 3), {4: torch.tensor([5.0, 6.0])}, torch.float32, "cpu", "")
        >>> ranges.shape, ranges.elements(4, 6)
        (torch.Size([2, 3]), tensor([5., 6.]))
    """

    ranges: dict[int, Tensor]
    loaded: dict[int, Tensor] | None
    origin: str

    @staticmethod
    def __new__(
        cls: type[Self],
        shape: Sequence[int],
        ranges: Mapping[int, Tensor],
        dtype: torch.dtype,
        device: torch.device | str,
        origin: str,
    ) -> Self:
        """Return a tensor without memory."""
        new: Self = wrapper_tensor(cls, torch.Size(shape), dtype=dtype, device=device)
        new.ranges, new.loaded, new.origin = dict(ranges), None, origin
        return new

    def elements(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) in one dimension, after a load the loaded elements."""
        for first, value in self.current.items():
            if first <= start and stop <= first + value.numel():
                return value[start - first : stop - first]
        raise ValueError(f"wanted are elements [{start}, {stop}), {self.describe()}")

    @property
    def current(self) -> dict[int, Tensor]:
        """The loaded ranges, or the given ranges before a load."""
        return self.ranges if self.loaded is None else self.loaded

    def _boxes(self) -> Iterator[tuple[Box, Tensor]]:
        """Yield boxes of all ranges, and their elements."""
        for first, value in self.current.items():
            for box in boxes_of(self.shape, first, first + value.numel()):
                yield box, value[box.start - first : box.stop - first].view(box.sizes)

    def describe(self) -> str:
        """Return the ranges as text, for errors."""
        own = [f"[{start}, {start + one.numel()})" for start, one in self.ranges.items()]
        return f"of a tensor of shape {tuple(self.shape)} this process has {', '.join(own)}"

    # ------------------------------------------------- the protocol of torch.distributed.checkpoint

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:  # noqa: A002
        from torch.distributed.checkpoint.metadata import (  # noqa: PLC0415  slow to import
            MetadataIndex,
            TensorProperties,
        )
        from torch.distributed.checkpoint.planner import (  # noqa: PLC0415
            TensorWriteData,
            WriteItem,
            WriteItemType,
        )

        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk_of(box),
                    properties=TensorProperties.create_from_tensor(value),
                    size=self.shape,
                ),
            )
            for box, value in self._boxes()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        # Only a load calls this method. Elements that the checkpoint may lack keep their values.
        self.loaded = {start: one.clone() for start, one in self.ranges.items()}
        return [_chunk_of(box) for box, _ in self._boxes()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for box, value in self._boxes():
            if box.offsets == index.offset:
                return value if self.loaded is None else value.as_subclass(_LoadTarget)
        raise ValueError(f"{index.fqn} has no box at {tuple(index.offset)}: {self.describe()}")

    # -------------------------------------------------------------------------------------- copies

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Copy each range, or refuse."""
        options = kwargs or {}
        one = args[0]
        if isinstance(one, FlatRanges) and func in _COPIES:
            copied = {at: func(value, **options) for at, value in one.current.items()}
            return _like(one, copied, one.shape, options)
        if isinstance(one, FlatRanges) and func is torch.ops.aten.new_empty.default:
            return _like(one, {}, args[1], options)  # async_save then sets the copied attributes
        lists = [value if isinstance(value, (list, tuple)) else [value] for value in args]
        texts = [x.describe() for values in lists for x in values if isinstance(x, FlatRanges)]
        raise TypeError(f"{func} cannot be computed: {' '.join(texts[:1])}; {_WAY_OUT}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled, as by ``torch.save``."""
        raise RuntimeError(
            f"a part of a state dict cannot be pickled: {self.describe()}; {_WAY_OUT}"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.describe()})"


def _chunk_of(box: Box) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: PLC0415

    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


class _LoadTarget(Tensor):
    """Memory that a checkpoint is read into. Numbers are not read from integers.

    Earlier releases saved 8-bit state as codes, which a copy would convert to numbers.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and args[0].is_floating_point() and not _is_real(args[1]):
            raise ValueError(
                f"the checkpoint has {args[1].dtype} for an entry that is {args[0].dtype}: the "
                "codes of 8-bit state, if an earlier release saved it. Write it to a file with "
                "`functional-optim convert FOLDER old.pt`, and load that with "
                "optimizer.load_state_dict(torch.load('old.pt')), which decodes the codes"
            )
        kwargs = kwargs or {}
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled as a plain tensor."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _is_real(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _like(
    one: FlatRanges, ranges: Mapping[int, Tensor], shape: Sequence[int], options: Mapping[str, Any]
) -> FlatRanges:
    """Return ranges with the same origin, and with the options of a tensor factory."""
    dtype, device = options.get("dtype") or one.dtype, options.get("device") or one.device
    return FlatRanges(shape, ranges, dtype, device, one.origin)


def elements_of(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Return elements [start, stop) of a tensor or of FlatRanges, in one dimension.

    Raises:
        ValueError: this process does not have all of them.
    """
    if isinstance(tensor, FlatRanges):
        return tensor.elements(start, stop)
    return tensor.detach().reshape(-1)[start:stop]


def whole_of(value: Any) -> Any:
    """Return the tensor of FlatRanges with all elements, and any other value unchanged.

    Raises:
        ValueError: this process does not have all elements.
    """
    if isinstance(value, FlatRanges):
        return value.elements(0, value.numel()).view(value.shape)
    return value


class OnOtherRanks(dict[str, Any]):
    """Empty entry of a parameter whose state is on other processes only."""

    def __init__(self, origin: str) -> None:
        super().__init__()
        self.origin = origin

    def __deepcopy__(self, memo: Any) -> "OnOtherRanks":
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled, as by ``torch.save``."""
        raise RuntimeError(
            "a part of a state dict cannot be pickled: the state of a parameter is on other ranks; "
            f"{_WAY_OUT}"
        )


def has_parts(states: Mapping[Any, Mapping[str, Any]]) -> bool:
    """Return True if any of these states is a part, with the rest on other processes."""
    return any(True for _ in _origins(states))


def check_origin(states: Mapping[Any, Mapping[str, Any]], own: str, rank: str) -> None:
    """Check that all parts in these states are of this process."""
    for path, origin in _origins(states):
        if origin != own:
            raise ValueError(
                f"{rank} was given a part of the state of {path!r} that {origin} has, and this is "
                f"{own}: save it with torch.distributed.checkpoint, and load it into what "
                "get_optimizer_state_dict() or state_dict() of this optimizer returns"
            )


def _origins(states: Mapping[Any, Mapping[str, Any]]) -> Iterator[tuple[Any, str]]:
    """Yield the path and the origin of every part."""
    for path, entries in states.items():
        for one in (entries, *entries.values()):
            if isinstance(one, (FlatRanges, OnOtherRanks)):
                yield path, one.origin


def _reduce_ranges(one: FlatRanges) -> tuple[Any, ...]:
    return FlatRanges, (tuple(one.shape), one.current, one.dtype, one.device, one.origin)


def _reduce_entry(one: OnOtherRanks) -> tuple[Any, ...]:
    return OnOtherRanks, (one.origin,)


# Parts can be sent to a process that writes checkpoints for this one.
ForkingPickler.register(FlatRanges, _reduce_ranges)
ForkingPickler.register(OnOtherRanks, _reduce_entry)
