"""Between a backward pass and a step: what the ranks agree on first."""

from functional_optim.frontends.loss_scale import Scaling
from sharding.zero.join import hand_over, told
from sharding.zero.parts import Parts
from sharding.zero.scaler import found_anywhere, say_skipped


def prepared(parts: Parts, scaling: Scaling, *, uneven: bool, joined: bool) -> bool:
    """Make gradients ready for a step. Collective, where there is a scaler, or under ``Join``.

    Args:
        parts: of the optimizer.
        scaling: what GradScaler has put on it.
        uneven: whether ranks may run out of data.
        joined: whether this one has.

    Returns:
        Whether the step is to be made: the same on all ranks.
    """
    turn = told(parts, joined=joined, found_inf=scaling.found) if uneven else None
    skip = found_anywhere(parts, scaling) if turn is None else turn.skip
    if skip:
        say_skipped(here=scaling.found)
        return False
    scaling.unscale_(param.grad for param in parts.params.values())
    if turn is not None:
        hand_over(parts, turn)
    return True
