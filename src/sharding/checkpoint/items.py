"""Write requests of ``torch.distributed.checkpoint`` for boxes. This module is slow to import."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from sharding.checkpoint.boxes import Box


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """Return the offsets and sizes of a box."""
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def write_items(
    name: str, shape: Sequence[int], boxes: Iterable[tuple[Box, Tensor]]
) -> list[WriteItem]:
    """Return a request to write each box."""
    return [
        WriteItem(
            index=MetadataIndex(name, torch.Size(box.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk_of(box),
                properties=TensorProperties.create_from_tensor(value),
                size=torch.Size(shape),
            ),
        )
        for box, value in boxes
    ]
