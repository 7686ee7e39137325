"""Storage writer for ``torch.distributed.checkpoint``: durable files, and a checksum of each."""

import dataclasses
import pickle
from os import PathLike
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from sharding.storage.checksums import (
    METADATA,
    METADATA_PART,
    encode_checksums,
    read_checksums,
    remove_leftovers,
)
from sharding.storage.files import Checksum, DurableFiles

_BLOCKING_COPY = StagingOptions(
    use_pinned_memory=False,
    use_shared_memory=False,
    use_async_staging=False,
    use_non_blocking_copy=False,
)


class _WriteResults(list[WriteResult]):
    """Write results of one rank, with the checksums of its files."""

    checksums: dict[str, Checksum]


class ChecksumWriter(FileSystemWriter):
    """torch's ``FileSystemWriter``, with durable files and checksums.

    Pass it to ``torch.distributed.checkpoint.save`` or ``async_save``. The files have torch's
    format, so every reader of torch loads them. An additional file, ``checksums-TOKEN.json``, has
    the size and the CRC-32 of each file.

    A checkpoint in the folder stays valid until the new one is complete: files have new names, and
    are synced before ``.metadata`` is replaced atomically. So a full disk, a killed process or a
    loss of power leaves a valid checkpoint. The next save to the folder removes incomplete files;
    it removes only files whose names saves give. Only one training may save to a folder at a time,
    and all ranks must see the folder.

    Args:
        path: the folder; it is created.
        thread_count: number of threads of each rank that write.

    Raises:
        ValueError: when saving, ``use_collectives=False``: then no rank knows all files.
        OSError: when saving, a file could not be written, or the first rank does not see it.

    Example::

        >>> import tempfile, warnings
        >>> import torch
        >>> import torch.distributed.checkpoint as dcp
        >>> from sharding.storage import ChecksumReader, ChecksumWriter
        >>> warnings.filterwarnings("ignore", "torch.distributed is disabled")
        >>> folder = tempfile.mkdtemp()
        >>> _ = dcp.save({"w": torch.ones(2)}, storage_writer=ChecksumWriter(folder))
        >>> state = {"w": torch.zeros(2)}
        >>> dcp.load(state, storage_reader=ChecksumReader(folder))
        >>> state["w"]
        tensor([1., 1.])
    """

    def __init__(self, path: str | PathLike[str], *, thread_count: int = 1) -> None:
        # DurableFiles syncs each file, once.
        super().__init__(path, sync_files=False, thread_count=thread_count)
        self.fs: DurableFiles = DurableFiles()
        self._token = ""

    def stage(self, state_dict: Any) -> Any:
        """Return a copy on the CPU, for ``async_save``, as torch makes it without a writer.

        The stagers of ``FileSystemWriter`` take plain tensors and DTensors only.
        """
        return DefaultStager(_BLOCKING_COPY).stage(state_dict)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save.

        Raises:
            ValueError: without collectives.
        """
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "ChecksumWriter writes one file of checksums for all ranks, got "
                "use_collectives=False; save with use_collectives=True"
            )
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the folder."""
        self.fs.mkdir(self.path)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give files names that no earlier save has used. Runs on the first rank."""
        folder, self._token = Path(self.path), uuid4().hex[:8]
        try:
            remove_leftovers(self.fs, folder, read_checksums(folder).names())
        except FileNotFoundError:
            remove_leftovers(self.fs, folder, ())
        except ValueError:
            pass  # the files of that checkpoint are unknown, so none is removed
        made = []
        for plan in super().prepare_global_plan(plans):
            prefix = f"__{self._token}{plan.storage_data.prefix[1:]}"
            data = dataclasses.replace(plan.storage_data, prefix=prefix)
            made.append(dataclasses.replace(plan, storage_data=data))
        return made

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and sync the files of this rank."""
        self.fs.checksums.clear()
        written = _WriteResults(super().write_data(plan, planner).value())
        self.fs.sync_folder(self.path)
        written.checksums = dict(self.fs.checksums)
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write checksums, and then ``.metadata``. Runs on the first rank.

        Raises:
            OSError: a file could not be written, or this rank does not see a file of another rank.
        """
        folder, found = Path(self.path), dict[str, Checksum]()
        for one in results:
            assert isinstance(one, _WriteResults), "from write_data"
            found.update(one.checksums)
        _check_sizes(folder, found)
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {one.index: one.storage_data for each in results for one in each}
        metadata.storage_meta = self.storage_meta()
        content, sidecar = pickle.dumps(metadata), f"checksums-{self._token}.json"
        for name, data in ((sidecar, encode_checksums(found, content)), (METADATA_PART, content)):
            with self.fs.create_stream(folder / name, "wb") as file:
                file.write(data)
        self.fs.sync_folder(folder)
        self.fs.rename(folder / METADATA_PART, folder / METADATA)
        self.fs.sync_folder(folder)
        remove_leftovers(self.fs, folder, {sidecar, *found})


def _check_sizes(folder: Path, files: dict[str, Checksum]) -> None:
    """Raise OSError if this rank does not see the files of all ranks, with the right sizes."""
    for name, wanted in files.items():
        path = folder / name
        size = path.lstat().st_size if path.is_file() else None
        if size != wanted.size:
            there = "is not there" if size is None else f"has {size} bytes"
            raise OSError(
                f"{path} {there}, as the first rank sees it, and its rank has written "
                f"{wanted.size} bytes; save a checkpoint to a folder that all ranks see"
            )
