"""One rank of these tests: the one of ``tests/ddp``, with the jobs of this folder."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    shared = runpy.run_path(str(Path(__file__).parents[1] / "ranks.py"))
    shared["run_rank"](__file__, *sys.argv[1:])
