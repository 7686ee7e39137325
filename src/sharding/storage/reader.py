"""Storage reader for ``torch.distributed.checkpoint`` that checks files and runs no code."""

import io
import pathlib
import pickle
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, metadata
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from functional_optim._torch.modules import names_in_metadata
from functional_optim.storage.state_storage import STATE_STORAGES
from sharding.storage.checksums import METADATA, read_checksums, read_metadata_file
from sharding.storage.files import Checksum, DurableFiles, check_file

_ALLOWED: dict[tuple[str, str], Any] = {
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
"""Classes and functions that torch names in ``.metadata``. They only store their arguments."""


class ChecksumReader(FileSystemReader):
    """torch's ``FileSystemReader``, which first checks the files that ``ChecksumWriter`` wrote.

    Pass it to ``torch.distributed.checkpoint.load``. Before anything is loaded, every file is read
    by one of the ranks, and compared with its checksum. No code of a file runs: ``.metadata`` must
    have only what torch writes there, and other values must be plain, as for ``torch.load`` with
    ``weights_only=True``. A checksum finds damage. It is no signature: anybody who writes other
    files can also write their checksums.

    Args:
        path: the folder.
        process_group: the group that is passed to ``load``; None for all ranks.
        verify: False for folders without checksums, such as those of ``FileSystemWriter``.

    Raises:
        torch.distributed.checkpoint.CheckpointException: when loading, on all ranks: no checkpoint
            was completed, a file is damaged or missing, or has values that are not plain. It names
            the ranks with the error.

    Example: see :class:`~sharding.storage.ChecksumWriter`.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        process_group: dist.ProcessGroup | None = None,
        *,
        verify: bool = True,
    ) -> None:
        super().__init__(path)
        self.fs: DurableFiles = DurableFiles()
        self._group, self._verify = process_group, verify
        self._files: dict[str, Checksum] = {}
        self._codes: frozenset[str] = frozenset()

    # No parameter is named "kwargs", else torch would ask for the metadata of one rank.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Return the checked metadata.

        Raises:
            FileNotFoundError: no checkpoint was completed there.
            ValueError: the metadata is damaged, or names a file that the checkpoint does not have.
        """
        folder = Path(self.path)
        if self._verify:
            recorded = read_checksums(folder)
            self._files, content = dict(recorded.files), recorded.metadata
        else:
            content = read_metadata_file(folder)
        found = decode_metadata(content, folder / METADATA)
        for name in {one.relative_path for one in found.storage_data.values()}:
            if Path(name).name != name or (self._verify and name not in self._files):
                raise ValueError(f"{folder / METADATA} names {name!r}, no file of the checkpoint")
        self._codes = _keys_of_codes(found)
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check this rank's share of the files.

        Raises:
            ValueError: a file is damaged.
        """
        rank, size = self._rank_and_size()
        for name in sorted(self._files)[rank::size]:
            check_file(Path(self.path) / name, self._files[name])
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Make sure that all files were checked.

        Raises:
            ValueError: ranks of another process group load.
        """
        if self._files and len(plans) != (size := self._rank_and_size()[1]):
            raise ValueError(
                f"ChecksumReader was made for {size} ranks, {len(plans)} load; give it "
                "the process_group that load() is given"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the data that this rank needs.

        Raises:
            ValueError: a value that is not plain; or 8-bit codes of an earlier release would be
                read as numbers.
        """
        for item in plan.items:
            if item.storage_index.fqn in self._codes:
                _check_takes_codes(item, planner.resolve_tensor(item), Path(self.path))
        return super().read_data(plan, _PlainValuePlanner(planner))

    def _rank_and_size(self) -> tuple[int, int]:
        if not dist.is_available() or not dist.is_initialized() or self.rank is None:
            return 0, 1
        return self.rank, dist.get_world_size(self._group)


def _keys_of_codes(found: Metadata) -> frozenset[str]:
    """Return the keys of 8-bit state, which releases before this one saved as codes and scales."""
    suffix, every = STATE_STORAGES["int8"].suffixes[1], found.state_dict_metadata
    return frozenset(
        key
        for key, one in every.items()
        if isinstance(one, TensorStorageMetadata)
        and one.properties.dtype == torch.uint8
        and key + suffix in every
    )


def _check_takes_codes(item: ReadItem, target: torch.Tensor, folder: Path) -> None:
    """Raise ValueError for a tensor of numbers: torch would convert each code to a number."""
    if target.is_floating_point():
        raise ValueError(
            f"{item.storage_index.fqn!r} in {folder} has the codes of 8-bit state, which an "
            f"earlier release saved, and is to be loaded as {target.dtype}. Write it to a file "
            f"with `functional-optim convert {folder} old.pt`, and load that with "
            "optimizer.load_state_dict(torch.load('old.pt')), which decodes the codes"
        )


class _PlainValuePlanner(LoadPlanner):
    """Planner that checks that values are plain, and passes everything to another planner."""

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged bytes may raise any error
            raise ValueError(
                f"{read_item.dest_index.fqn!r} is damaged, or cannot be read without running code; "
                f"if you trust the files, load them without ChecksumReader: {error}"
            ) from error
        value.seek(0)
        self._planner.load_bytes(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._planner.resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._planner.commit_tensor(read_item, tensor)

    def set_up_planner(self, *args: Any, **options: Any) -> None:
        raise AssertionError("only reads")

    create_local_plan = create_global_plan = finish_plan = set_up_planner  # type: ignore[assignment]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name)) or names_in_metadata().get((module, name))
        if found is None:
            raise ValueError(f"it has {module}.{name}")
        return found


def decode_metadata(content: bytes, path: Path) -> Metadata:
    """Return the metadata of a checkpoint, from the content of its file. No code of the file runs.

    Raises:
        ValueError: the file was damaged, or has more than torch writes into it.
    """
    try:
        found = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # damaged bytes may raise any error
        raise ValueError(
            f"{path} cannot be read without running code, or was damaged: {error}"
        ) from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise ValueError(f"{path} is no metadata of torch.distributed.checkpoint")
    return found
