"""Inner hooks that launch collectives from callbacks, and what DDP may launch before those.

Out of order, ranks take each other's data for their own; gloo ends the process for that. So these
runs have launches of their own (see ``test_order.py``).
"""

from typing import Any

from .cases import ONE, SGD, UNUSED
from .models import Branches
from .twins import Case, compare

SLOW = SGD._replace(inner="slow", in_order=True, iterations=3)

IN_ORDER: dict[str, Case] = {
    "slow": SLOW,
    "slow, unused": SLOW._replace(model=Branches, ddp=UNUSED),
    "power, one bucket, unused": SGD._replace(
        inner="power", in_order=True, ddp={**ONE, "find_unused_parameters": True}, iterations=5
    ),
    "power, unused": SGD._replace(
        inner="power", in_order=True, model=Branches, ddp=UNUSED, iterations=7
    ),
}


def run_in_order(name: str) -> list[dict[str, Any]]:
    """One comparison."""
    return compare(IN_ORDER[name])
