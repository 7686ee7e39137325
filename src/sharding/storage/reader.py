"""Storage reader for ``torch.distributed.checkpoint`` that checks files and runs no code."""

import io
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from sharding.storage.checksums import METADATA, read_checksums, read_metadata_file
from sharding.storage.files import Checksum, DurableFiles, check_file
from sharding.storage.metadata import decode_metadata


class ChecksumReader(FileSystemReader):
    """torch's ``FileSystemReader``, which reads what ``ChecksumWriter`` wrote and checks it first.

    Give it to ``torch.distributed.checkpoint.load``. Every file is read once more and compared with
    its checksum, each by one of the ranks, before anything is loaded. No code of a file runs:
    ``.metadata`` must have what torch writes there, and other values must be plain, as
    ``torch.load`` takes them with ``weights_only=True``. A checksum finds damage. It is no
    signature: whoever writes other files can write their checksums.

    Args:
        path: the folder.
        process_group: the one that is given to ``load``; None for all ranks.
        verify: False for folders without checksums, such as those of ``FileSystemWriter``.

    Raises:
        torch.distributed.checkpoint.CheckpointException: when loading, on all ranks: no checkpoint
            was completed, a file is damaged or missing, or has values that are not plain. It names
            the ranks that found it.

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

    # Without a parameter named "kwargs": torch would ask for the metadata of one rank otherwise.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Return the metadata, checked.

        Raises:
            FileNotFoundError: no checkpoint was completed there.
            ValueError: it is damaged, or names a file that the checkpoint does not have.
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
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check this rank's share of the files.

        Raises:
            ValueError: a file is damaged.
        """
        rank, size = self._place()
        for name in sorted(self._files)[rank::size]:
            check_file(Path(self.path) / name, self._files[name])
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Make sure that all files were checked.

        Raises:
            ValueError: ranks of another process group load.
        """
        if self._files and len(plans) != self._place()[1]:
            raise ValueError(
                f"ChecksumReader was made for {self._place()[1]} ranks, {len(plans)} load; give it "
                "the process_group that load() is given"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank needs.

        Raises:
            ValueError: a value that is not plain.
        """
        return super().read_data(plan, _PlainValues(planner))

    def _place(self) -> tuple[int, int]:
        """Return this rank, and how many there are."""
        if not dist.is_available() or not dist.is_initialized() or self.rank is None:
            return 0, 1
        return self.rank, dist.get_world_size(self._group)


class _PlainValues(LoadPlanner):
    """Planner that takes plain values only, and leaves all else to another planner."""

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises whatever the bytes lead to
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
