"""Sharded training: what is trained, on how many ranks, by whom, and who is timed beside whom."""

from typing import Any, NamedTuple

from benchmarks.workloads import Size

DDP_FOREACH = "DDP, foreach"
DDP_FUSED = "DDP, fused, views"
TORCH_ZERO = "torch ZeRO"
"""As it is constructed, without an option."""
TORCH_BEST = "torch ZeRO, fused, views"
FSDP = "FSDP2"
PEERS = (DDP_FOREACH, DDP_FUSED, TORCH_BEST, TORCH_ZERO, FSDP)

STEP_DEFAULT = "step, as constructed"
"""With torch's arguments only, and DDP without an option."""
STEP_GREEDY = "step, greedy"
STEP_GREEDY_FUSED = "step, greedy, fused"
STEP_ELEMENTS = "step, elements"
STEP_ELEMENTS_FUSED = "step, elements, fused"
HOOK_ELEMENTS = "zero_step_hook, elements"
HOOK_ELEMENTS_FORWARD = "zero_step_hook, elements, into forward"
HOOK_SLICED = "zero_step_hook, sliced"
HOOK_SLICED_FORWARD = "zero_step_hook, sliced, into forward"
HOOK_GREEDY = "zero_step_hook, greedy"
WITH_HOOK = "hook_with_zero_step, elements"
OURS = (
    STEP_DEFAULT,
    STEP_GREEDY,
    STEP_GREEDY_FUSED,
    STEP_ELEMENTS,
    STEP_ELEMENTS_FUSED,
    HOOK_ELEMENTS,
    HOOK_ELEMENTS_FORWARD,
    HOOK_SLICED,
    HOOK_SLICED_FORWARD,
    HOOK_GREEDY,
    WITH_HOOK,
)
SAVE = "save"
"""Ours, where state is saved."""
DCP = "FSDP2, dcp.save"
"""The other one there: sharded too, and with its files synced, as is its default."""
NAMES = (*PEERS, *OURS)
JUDGED = HOOK_ELEMENTS
"""The one of ours that the promises of speed and memory are about: always the same one."""

START = "the start"
"""Where a rank is before it comes to anybody."""
UNIT = DDP_FOREACH
ANCHORS = (UNIT, DDP_FUSED, TORCH_BEST)
"""In every heat: whatever else is compared, these are timed beside it."""
HEATS: dict[str, tuple[str, ...]] = {
    "others": (TORCH_ZERO, FSDP, STEP_DEFAULT),
    "steps": (STEP_GREEDY, STEP_GREEDY_FUSED, STEP_ELEMENTS, STEP_ELEMENTS_FUSED),
    "hooks": (HOOK_SLICED, HOOK_SLICED_FORWARD, WITH_HOOK),
    "hooks, other plans": (HOOK_ELEMENTS, HOOK_ELEMENTS_FORWARD, HOOK_GREEDY),
}
"""Who else is in a heat, by its name; each has its own model, so that not all fit at once."""

LAYERS_10, LAYERS_20, GPT = "10 layers", "20 layers", "GPT"


class Place(NamedTuple):
    """A model, and how many ranks train it."""

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
"""Of AdamW, for all."""

CHECKED_STEPS = 3
"""After so many steps the parameters are compared with those of one unsharded AdamW."""
TOLERANCE = 0.01
"""How far they may be, by the 2-norm, in units of how far the unsharded ones have moved."""
SUM_TOLERANCE = 1e-4
"""How far their sum may be, in units of the 1-norm of how far the unsharded ones have moved."""

ITERATIONS: dict[Size, int] = {"full": 2, "quick": 2, "tiny": 1}
"""In a turn. What goes on into the next forward pass has something to gain from the second."""
LIMIT_SECONDS: dict[Size, float] = {"full": 150.0, "quick": 100.0, "tiny": 600.0}
"""For how long all ranks may be silent before they are given up."""
SAVING_TIMES = 4
"""So many times as long where they save: a contestant says nothing until it has."""
