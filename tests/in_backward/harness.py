"""The harness of ``tests/ddp``, a copy of its modules for this folder's jobs."""

import runpy
from pathlib import Path

HERE = Path(__file__).parent
house = runpy.run_path(str(HERE.parent / "ranks.py"))["house_for"](HERE)
Job = house("processes").Job
Outcomes = house("processes").Outcomes
run_ranks = house("processes").run_ranks
Launched = house("conftest").Launched
launched = house("conftest").launched
