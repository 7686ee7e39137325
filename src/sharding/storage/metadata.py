"""``.metadata`` of a checkpoint, which is a pickle: read without running code."""

import io
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.metadata import Metadata

from functional_optim._torch import names_in_metadata

_KNOWN: dict[tuple[str, str], Any] = {
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib", "PurePosixPath"): pathlib.PurePosixPath,
    ("pathlib", "WindowsPath"): pathlib.PureWindowsPath,
    ("pathlib", "PureWindowsPath"): pathlib.PureWindowsPath,
    ("torch", "Size"): torch.Size,
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
            *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            "_MEM_FORMAT_ENCODING",
        )
    },
    **{("torch", name): one for name, one in vars(torch).items() if isinstance(one, torch.dtype)},
}
"""Classes and functions that torch names in ``.metadata``: they only keep what they are given."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _KNOWN.get((module, name)) or names_in_metadata().get((module, name))
        if found is None:
            raise ValueError(f"it has {module}.{name}")
        return found


def decode_metadata(content: bytes, path: Path) -> Metadata:
    """Return the metadata of a checkpoint. No code of the file runs.

    Args:
        content: of the file.
        path: of the file, for errors.

    Raises:
        ValueError: the file has more than torch writes into it, or was damaged.
    """
    try:
        found = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # pickle raises whatever the bytes lead to
        raise ValueError(
            f"{path} cannot be read without running code, or was damaged: {error}"
        ) from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise ValueError(f"{path} is no metadata of torch.distributed.checkpoint")
    return found
