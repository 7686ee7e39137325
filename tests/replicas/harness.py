"""The harness of ``tests/ddp``, a copy of its modules for this folder's jobs."""

import runpy
from pathlib import Path

HERE = Path(__file__).parent
__getattr__ = runpy.run_path(str(HERE.parent / "ranks.py"))["harness_for"](HERE)
