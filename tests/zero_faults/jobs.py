"""All jobs of this folder by name; two launches of processes run all of them."""

from benchmarks import sockets
from tests.ranks import Job

from . import scenarios
from .scenarios import PLAIN, STEP
from .sides import OURS, SIDES, TORCH

DDP = {
    "": {},
    "static_graph": {"static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
}
"""Options of DDP for the jobs that count moved parameters."""
WIRED = (PLAIN, STEP, *SIDES)
ONE_HOST = "one host"
CUT = "zero_step_hook, elements"
WITHOUT_OVERLAP = (TORCH, OURS[0])

ON_TWO = {
    **{
        f"iterations {option}, {side}": Job(
            scenarios.iterations, {"side": side, "ddp": DDP[option]}
        )
        for option in DDP
        for side in SIDES
    },
    **{
        f"{function.__name__}, {side}": Job(function, {"side": side})
        for function in (
            scenarios.learning_rates,
            scenarios.refused_on_gloo,
            scenarios.several_groups,
            scenarios.mixed_dtypes,
            scenarios.saved_under_overlap,
            scenarios.loaded_under_overlap,
        )
        for side in SIDES
    },
    **{
        f"callers_dict, {side}": Job(scenarios.callers_dict, {"side": side})
        for side in WITHOUT_OVERLAP
    },
    **{f"broadcasts, {kind}": Job(scenarios.broadcasts, {"kind": kind}) for kind in (STEP, *SIDES)},
}
ON_FOUR = {
    **{f"on_subgroup, {side}": Job(scenarios.on_subgroup, {"side": side}) for side in SIDES},
    **{f"pickles, {side}": Job(scenarios.pickles, {"side": side}) for side in WITHOUT_OVERLAP},
}
UNCOUNTED = sockets.uncounted()
"""Reason why this machine cannot count bytes, or None."""
if UNCOUNTED is None:
    BYTES = {f"bytes, {kind}": Job(scenarios.sent_bytes, {"kind": kind}) for kind in WIRED}
    BYTES[f"bytes, {CUT}"] = Job(scenarios.sent_bytes, {"kind": OURS[0], "policy": "elements"})
    BYTES |= {
        f"bytes, {kind}, {ONE_HOST}": Job(scenarios.sent_bytes, {"kind": kind, "memory": True})
        for kind in OURS
    }
    ON_FOUR |= BYTES
