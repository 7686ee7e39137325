"""The harness of ``tests/ddp``, a copy of its modules for this folder's jobs."""

import runpy
from pathlib import Path

HERE = Path(__file__).parent
house = runpy.run_path(str(HERE.parent / "ranks.py"))["house_for"](HERE)
processes = house("processes")
compared = house("compared")
torch_side = house("torch_side")
through_memory = house("through_memory")
