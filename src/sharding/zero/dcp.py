"""torch.distributed.checkpoint over our files: its planners find what is to be read from where.

Ranks do not ask one another anything here: what is whose is known from the plan.
"""

import math
import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from sharding.plan_json import dtype_name, dtype_named
from sharding.zero.files import Saved, put, read_tensor, write_tensor


class Ranges(NamedTuple):
    """Some elements of a flat tensor: what torch.distributed.checkpoint is given of it here."""

    shape: tuple[int, ...]
    """Of the whole tensor, before it was laid flat."""
    parts: Mapping[int, Tensor]
    """By the first element, contiguous tensors of one dimension."""

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(key, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties(dtype=part.dtype), torch.Size((math.prod(self.shape),))
                ),
            )
            for chunk, part in zip(self.__create_chunk_list__(), self.parts.values(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(start, part.numel()) for start, part in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.parts[index.offset[0]]


def _chunk(start: int, length: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size((start,)), torch.Size((length,)))


class _SavePlanner(DefaultSavePlanner):
    """Plans what one rank writes, whatever the others do."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        # torch would miss the elements that other ranks write.
        self.metadata = Metadata({})
        return all_plans, self.metadata

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class _LoadPlanner(DefaultLoadPlanner):
    """Finds the parts of our ranges in a checkpoint."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found: Tensor = self.state_dict[index.fqn].__get_tensor_shard__(index)
        return found


class _Writer(StorageWriter):
    """One rank's files."""

    def __init__(self, state: Mapping[str, Ranges], folder: Path, shard: str) -> None:
        self._state = state
        self._folder = folder
        self._shard = shard

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Nothing is left from another checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        begin = 0
        with (self._folder / f"{self._shard}.bin").open("wb", buffering=0) as file:
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                count = write_tensor(file, tensor)
                results.append(WriteResult(item.index, count, (begin, tensor.numel())))
                begin += count
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        tensors: dict[str, tuple[str, tuple[int, ...], list[tuple[int, int, int]]]] = {}
        total = 0
        for one in (result for of_rank in results for result in of_rank):
            begin, length = one.storage_data
            key, offset = one.index.fqn, one.index.offset
            assert offset is not None
            if key not in tensors:
                part = self._state[key].parts[offset[0]]
                tensors[key] = (dtype_name(part.dtype), self._state[key].shape, [])
            tensors[key][2].append((offset[0], length, begin))
            total += one.size_in_bytes
        put(self._folder / f"{self._shard}.json", {"bytes": total, "tensors": tensors})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        return False


class _Reader(StorageReader):
    """Every rank's files."""

    def __init__(self, folder: Path, saved: Mapping[str, Saved]) -> None:
        self._folder = folder
        self._saved = saved

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Nothing is left from another checkpoint."""

    def read_metadata(self) -> Metadata:
        return Metadata(
            {
                key: TensorStorageMetadata(
                    TensorProperties(dtype=dtype_named(one.dtype)),
                    torch.Size((one.numel,)),
                    [_chunk(chunk.offset, chunk.length) for chunk in one.chunks],
                )
                for key, one in self._saved.items()
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Everything is known already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[int, Tensor]]] = {}
        for item in plan.items:
            offset = item.storage_index.offset
            assert offset is not None
            chunks = self._saved[item.storage_index.fqn].chunks
            chunk = next(one for one in chunks if one.offset == offset[0])
            into = planner.resolve_tensor(item)
            begin = chunk.begin + item.storage_offsets[0] * into.element_size()
            by_file.setdefault(chunk.file, []).append((begin, into))
        for name, wanted in by_file.items():
            with (self._folder / f"{name}.bin").open("rb", buffering=0) as file:
                for begin, into in sorted(wanted, key=lambda one: one[0]):
                    read_tensor(file, begin, into)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        return False


def write(state: Mapping[str, Ranges], folder: Path, shard: str) -> None:
    """Write these ranges as one shard."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.save(
            dict(state),
            storage_writer=_Writer(state, folder, shard),
            planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=True,
        )


def read(state: Mapping[str, Ranges], folder: Path, saved: Mapping[str, Saved]) -> None:
    """Read these ranges, whoever wrote which part of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(
            dict(state),
            storage_reader=_Reader(folder, saved),
            planner=_LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=True,
        )
