"""One rank of these tests: the one of ``tests/ddp``, with the jobs of this folder."""

import importlib.util
import sys
from pathlib import Path

HOUSE = Path(__file__).parents[1] / "ddp" / "rank.py"


def main(folder: str, rank: str, ranks: str) -> None:
    spec = importlib.util.spec_from_file_location("house_rank", HOUSE)
    assert spec is not None and spec.loader is not None
    house = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(house)
    house.__file__ = __file__  # the package of jobs is the folder of this file
    house.main(Path(folder), int(rank), int(ranks))


if __name__ == "__main__":
    main(*sys.argv[1:])
