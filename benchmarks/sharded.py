"""Sharded training: models, numbers of ranks, contestants, and heats."""

from typing import Any, NamedTuple

from benchmarks.workloads import Size

DDP_FOREACH = "DDP, foreach"
DDP_FUSED = "DDP, fused, views"
TORCH_ZERO = "torch ZeRO"
"""Torch's class, constructed without options."""
TORCH_BEST = "torch ZeRO, fused, views"
FSDP = "FSDP2"
PEERS = (DDP_FOREACH, DDP_FUSED, TORCH_BEST, TORCH_ZERO, FSDP)

STEP_DEFAULT = "step, as constructed"
"""Ours with only torch's arguments, and DDP without options."""
STEP_GREEDY = "step, greedy"
STEP_GREEDY_FUSED = "step, greedy, fused"
STEP_ELEMENTS = "step, elements"
STEP_ELEMENTS_FUSED = "step, elements, fused"
HOOK_ELEMENTS = "zero_step_hook, elements"
HOOK_SLICED = "zero_step_hook, sliced"
HOOK_GREEDY = "zero_step_hook, greedy"
WITH_HOOK = "hook_with_zero_step, elements"
OURS = (
    STEP_DEFAULT,
    STEP_GREEDY,
    STEP_GREEDY_FUSED,
    STEP_ELEMENTS,
    STEP_ELEMENTS_FUSED,
    HOOK_ELEMENTS,
    HOOK_SLICED,
    HOOK_GREEDY,
    WITH_HOOK,
)
SAVE = "save"
"""Name of ours in the measurement of saving."""
DCP = "FSDP2, dcp.save"
"""Name of the peer in the measurement of saving: it shards the state too, and syncs files by
default."""
NAMES = (*PEERS, *OURS)
JUDGED = HOOK_ELEMENTS
"""Contestant of ours that the promises of speed and memory are about."""

START = "the start"
"""Name for the time before a rank comes to the first contestant."""
UNIT = DDP_FOREACH
ANCHORS = (UNIT, DDP_FUSED, TORCH_BEST)
"""Contestants of every heat, with which the others are compared."""
HEATS: dict[str, tuple[str, ...]] = {
    "others": (TORCH_ZERO, FSDP, STEP_DEFAULT),
    "steps": (STEP_GREEDY, STEP_GREEDY_FUSED, STEP_ELEMENTS, STEP_ELEMENTS_FUSED),
    "hooks": (HOOK_SLICED, WITH_HOOK),
    "hooks, other plans": (HOOK_ELEMENTS, HOOK_GREEDY),
}
"""Other contestants of each heat, by its name. Each has its own model, so not all fit at once."""

LAYERS_10, LAYERS_20, GPT = "10 layers", "20 layers", "GPT"


class Place(NamedTuple):
    """Model, and the number of ranks that train it."""

    model: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.model}, {self.ranks} ranks"


PLACES = {
    str(one): one
    for one in (
        Place(LAYERS_10, 2),
        Place(LAYERS_10, 4),
        Place(LAYERS_20, 2),
        Place(GPT, 2),
        Place(GPT, 4),
    )
}
QUICK_PLACES = tuple(str(one) for one in PLACES.values() if one.ranks == 2)
MEMORY_PLACE = Place(LAYERS_10, 2)
SAVING_PLACE = Place(LAYERS_20, 2)

RULE = "AdamW"
OPTIONS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
"""Options of AdamW for all contestants."""

CHECKED_STEPS = 3
"""Number of steps after which the parameters are compared with those of one unsharded AdamW."""
TOLERANCE = 0.01
"""Allowed distance of the parameters: a 2-norm, divided by the distance that the unsharded ones
moved."""
SUM_TOLERANCE = 1e-4
"""Allowed distance of the sum of the parameters, divided by the 1-norm of the unsharded
movement."""

ITERATIONS: dict[Size, int] = {"full": 2, "quick": 2, "tiny": 1}
"""Number of iterations in a turn."""
LIMIT_SECONDS: dict[Size, float] = {"full": 150.0, "quick": 100.0, "tiny": 600.0}
"""Time without progress of any rank after which a heat is given up."""
SAVING_TIMES = 4
"""Factor of this time for saving, because a contestant reports only after it has saved."""
