"""The benchmark lies beside the packages, not in them: it is found from the repository's root."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)

collect_ignore = ["troubled_rank.py"]  # a program, which takes over standard output
