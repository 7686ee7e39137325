"""One of the runs that are compared: a model under DDP, and its curves."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hooks.demo import text
from hooks.demo.front_ends import HyperParameters, Way, tensor_bytes
from hooks.demo.model import mean_loss
from hooks.demo.result import Difference, RunResult


class Run:
    """A model under DDP, with a way of stepping it, and its curves so far."""

    def __init__(self, way: Way, model: nn.Module, hyper: HyperParameters) -> None:
        # Small buckets (in MB), so that there are several and the steps overlap with backward.
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True)
        self.way = way
        self.front_end = way.make(self.ddp, hyper)
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self.gradient_bytes = 0
        self.sent_bytes = 0.0

    def step(self, batch: text.Batch) -> None:
        """One step of training."""
        loss = mean_loss(self.ddp, *batch)
        loss.backward()
        self.front_end.step()
        self.gradient_bytes = tensor_bytes(
            param.grad for param in self.ddp.parameters() if param.grad is not None
        )
        self.ddp.zero_grad()
        self.losses.append(loss.item())

    def finish(self) -> None:
        """Called after the last step."""
        world = dist.get_world_size()
        reduced = 2 * self.gradient_bytes * (world - 1) / world  # as a ring all-reduces
        self.sent_bytes = self.front_end.sent_bytes(reduced, len(self.losses))
        self.front_end.finish()

    @torch.no_grad()
    def validate(self, batch: text.Batch) -> float:
        """Take the validation loss."""
        # The wrapped model: DDP's own forward would talk to the other ranks.
        loss = mean_loss(self.ddp.module, *batch).item()
        self.validation.append((len(self.losses), loss))
        return loss

    def flat_parameters(self) -> Tensor:
        """A copy of all parameters, as one vector."""
        return torch.cat([param.detach().reshape(-1) for param in self.ddp.parameters()])

    def result(self, first: "Run") -> RunResult:
        """What this rank measured. All ranks must call it together.

        Args:
            first: the run that this one is compared with.
        """
        parameters = self.flat_parameters()
        of_rank_zero = parameters.clone()
        dist.broadcast(of_rank_zero, src=0)
        return RunResult(
            name=self.way.name,
            title=self.way.title,
            exact=self.way.exact,
            spread=self.way.spread,
            differs=self.way.differs,
            losses=self.losses,
            validation=self.validation,
            from_first=compare(parameters, first.flat_parameters()),
            from_rank_zero=compare(parameters, of_rank_zero),
            parameter_bytes=tensor_bytes(self.ddp.parameters()),
            gradient_bytes=self.gradient_bytes,
            state_bytes=self.front_end.state_bytes(),
            sent_bytes=self.sent_bytes,
        )


def compare(one: Tensor, other: Tensor) -> Difference:
    """Compare two float32 vectors, bit by bit and by value."""
    same = torch.equal(one.view(torch.int32), other.view(torch.int32))
    return Difference(same, (one - other).abs().max().item())
