"""``make agreement``: measure the differences from other implementations, and store them.

``make agreement ARGS="optax dog"`` measures only these packages, and keeps the other results.
"""

import json
import sys
import warnings

import torch

from docs._pages.differences import DATA, stored, unexplained, write
from tests.agreement.measure import measure

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    before = stored() if DATA.exists() else {}
    results = measure(lambda text: sys.stderr.write(f"{text}\n"), before, sys.argv[1:])
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write(results)
    if found := unexplained(results):
        sys.exit("\n".join(["These differences have no cause that an experiment shows:", *found]))
