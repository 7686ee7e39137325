"""What is compiled, on disk: a file, and beside it the facts by which it is known to be whole."""

import hashlib
import json
from pathlib import Path


class BrokenEntryError(Exception):
    """A file on disk that is not what was written there."""


def publish(made: Path, target: Path, facts: Path) -> None:
    """Put what was made in its place; whoever looks meanwhile sees all of it or nothing.

    Args:
        made: in a folder of its own on the same disk.
        target: its place.
        facts: the place of what is known of it.
    """
    note = made.parent / "facts.json"
    note.write_text(json.dumps({"sha256": _digest(made)}))
    made.replace(target)
    note.replace(facts)  # last: an entry without it is not there yet


def is_there(target: Path, facts: Path) -> bool:
    """Whether there is an entry, as it was published.

    Raises:
        BrokenEntryError: what is there is not what was written.
    """
    try:
        wanted = json.loads(facts.read_text())["sha256"]
        found = _digest(target)
    except (FileNotFoundError, NotADirectoryError) as error:
        if error.filename == str(target):
            raise BrokenEntryError(f"{target} is missing") from error
        return False
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BrokenEntryError(f"{facts}: {error}") from error
    if found != wanted:
        raise BrokenEntryError(f"{target} has changed since it was written")
    return True


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
