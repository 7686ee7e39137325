"""Counts bytes on N ranks, and prints what they found; run by ``test_bytes.py``.

A program, so that it can be started in a network namespace where nobody else sends anything.
"""

import json
import sys

from tests.ranks import Job, run_ranks
from tests.transport import jobs


def main(ranks: int) -> None:
    found = run_ranks({"count": Job(jobs.counted)}, ranks=ranks, seconds=120)
    sys.stdout.write(json.dumps([outcome.result() for outcome in found["count"]]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
