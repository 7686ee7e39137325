"""Private names that ``.metadata`` of ``torch.distributed.checkpoint`` contains."""

from typing import Any

import torch

from functional_optim._torch.missing import Missing, held


def names_in_metadata() -> dict[tuple[str, str], Any]:
    """Return private functions and classes that torch pickles by name, by module and name.

    They only keep what they are given.

    Raises:
        ImportError: torch has one of them no longer.
    """
    from torch.distributed.checkpoint import filesystem

    names = ((torch.serialization, "_get_layout"), (filesystem, "_StorageInfo"))
    return {
        (owner.__name__, name): held(
            owner,
            name,
            Missing(
                f"{owner.__name__}.{name}",
                "metadata of a checkpoint cannot be read without running code of the file",
                "read checkpoints that you trust by torch's FileSystemReader",
            ),
        )
        for owner, name in names
    }
