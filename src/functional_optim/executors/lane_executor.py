"""An executor that runs a kernel over lanes: leaves packed, cut and stepped in place."""

from collections.abc import Sequence

import torch
from torch import Tensor

from functional_optim.executors.kernel import Kernel
from functional_optim.executors.lanes import lanes, scatter, why_not_pointwise
from functional_optim.executors.leaf import Leaf, Stepped, is_measured
from functional_optim.executors.reference import ReferenceExecutor
from functional_optim.forms import map_state
from functional_optim.stage import Stage

MEASURED_BLOCK = 1 << 20
"""Elements over which the sum of a measured stage is taken at a time."""


class LaneExecutor:
    """Runs kernels over lanes; leaves that cannot be lanes go through the reference executor.

    Args:
        kernels: what steps a lane: the first that does not refuse it, or else the reference.
    """

    def __init__(self, *kernels: Kernel) -> None:
        self.kernels = kernels
        self._reference = ReferenceExecutor()

    def update(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> list[Stepped]:
        """The step in place, on copies."""
        copies = [
            leaf._replace(
                param=leaf.param.clone(),
                states=tuple(map_state(torch.clone, state) for state in leaf.states),
            )
            for leaf in leaves
        ]
        self.update_(stages, copies, measured)
        return [Stepped(leaf.param, leaf.states) for leaf in copies]

    def update_(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> None:
        with torch.no_grad():
            if why_not_pointwise(stages):
                self._reference.update_(stages, leaves, measured)
                return
            totals = list(measured)
            while len(totals) < sum(map(is_measured, stages)):
                totals.append(self.measure(stages, leaves, totals))
            others: list[Leaf] = []
            for lane in lanes(stages, leaves, others):
                if self.step_lane(stages, lane.leaf, totals):
                    scatter(lane)
                else:
                    others += lane.packed or (lane.leaf,)
            if others:
                self._reference.update_(stages, others, totals)

    def step_lane(self, stages: Sequence[Stage], lane: Leaf, totals: Sequence[Tensor]) -> bool:
        """Step one lane by the first kernel that takes it; False if none does."""
        for kernel in self.kernels:
            if kernel.refuses(stages, lane) is None:
                kernel.run(stages, lane, totals)
                return True
        return False

    def measure(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> Tensor:
        """The sum, block by block, so that no whole gradient is held beside the given ones."""
        wanted = [i for i, stage in enumerate(stages) if is_measured(stage)][len(measured)]
        if wanted == 0 or why_not_pointwise(stages[: wanted + 1]):
            return self._reference.measure(stages, leaves, measured)
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        for leaf in leaves:
            for piece in _pieces(leaf):
                total = total + self._reference.measure(stages, [piece], measured).to(total.device)
        return total


def _pieces(leaf: Leaf) -> list[Leaf]:
    """A large leaf, cut for a stage before which something changes the gradient."""
    count = leaf.param.numel()
    if count <= MEASURED_BLOCK or leaf.param.dim() == 0:
        return [leaf]

    def cut(tensor: Tensor, at: int) -> Tensor:
        if tensor.numel() != count:
            return tensor
        return tensor.detach().reshape(-1)[at : at + MEASURED_BLOCK]

    return [
        leaf._replace(
            param=cut(leaf.param, at),
            grad=cut(leaf.grad, at),
            states=tuple(map_state(lambda t, at=at: cut(t, at), state) for state in leaf.states),
        )
        for at in range(0, count, MEASURED_BLOCK)
    ]
