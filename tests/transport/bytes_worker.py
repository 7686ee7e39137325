"""Counts bytes on N ranks, and prints what they found; run by ``test_bytes.py``.

A script, so that it can be started in a network namespace where nobody else sends anything.
"""

import importlib.util
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = "bytes_of_transport"


def main(ranks: int) -> None:
    spec = importlib.util.spec_from_file_location(
        PACKAGE, HERE / "__init__.py", submodule_search_locations=[str(HERE)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    harness = importlib.import_module(f"{PACKAGE}.harness")
    jobs = importlib.import_module(f"{PACKAGE}.jobs")
    found = harness.run_ranks({"count": harness.Job(jobs.counted)}, ranks=ranks, seconds=120)
    sys.stdout.write(json.dumps([outcome.result() for outcome in found["count"]]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
