"""Files that belong to another user of the machine."""

import os
from pathlib import Path

import pytest

STRANGER = 12345


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a file to another user; without root rights, only ``os.fstat`` reports that user."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER)
        return
    wanted, fstat = path.stat(), os.fstat

    def strange(number: int) -> os.stat_result:
        found = fstat(number)
        if (found.st_dev, found.st_ino) != (wanted.st_dev, wanted.st_ino):
            return found
        return os.stat_result([*found[:4], STRANGER, *found[5:]])

    monkeypatch.setattr(os, "fstat", strange)
