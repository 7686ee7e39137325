"""Base class of the compared runs: a model, a way of stepping it, and its curves."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hooks.demo import text
from hooks.demo.front_ends import ComparedRun, HyperParameters, tensor_bytes
from hooks.demo.model import mean_loss
from hooks.demo.result import Difference, RunResult


class BaseRun(ABC):
    """A way of stepping a model, and its curves so far."""

    def __init__(self, way: ComparedRun) -> None:
        self.way = way
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self.gradient_bytes = 0

    @abstractmethod
    def step_by(self, batch: text.Batch) -> tuple[float, int]:
        """Make a step; return the loss before it, and the bytes of its gradients."""

    @abstractmethod
    def loss(self, batch: text.Batch) -> float:
        """The loss as it is now, on this process alone."""

    @abstractmethod
    def parameters(self) -> Iterable[Tensor]:
        """Return the current parameters, in the order of the model."""

    @abstractmethod
    def measured(self) -> dict[str, Any]:
        """Return the other fields of a RunResult. All ranks must call it together."""

    def step(self, batch: text.Batch) -> None:
        """Make a step of training."""
        loss, self.gradient_bytes = self.step_by(batch)
        self.losses.append(loss)

    def finish(self) -> None:  # noqa: B027  most have nothing to do
        """Called after the last step."""

    @torch.no_grad()
    def validate(self, batch: text.Batch) -> float:
        """Take the validation loss."""
        loss = self.loss(batch)
        self.validation.append((len(self.losses), loss))
        return loss

    def flat_parameters(self) -> Tensor:
        """A copy of all parameters, as one vector."""
        return torch.cat([param.detach().reshape(-1) for param in self.parameters()])

    def result(self, first: "BaseRun") -> RunResult:
        """Return the result of this rank. All ranks must call it together.

        Args:
            first: the run that this one is compared with.
        """
        return RunResult(
            name=self.way.name,
            title=self.way.title,
            exact=self.way.exact,
            spread=self.way.spread,
            differs=self.way.differs,
            losses=self.losses,
            validation=self.validation,
            from_first=compare(self.flat_parameters(), first.flat_parameters()),
            gradient_bytes=self.gradient_bytes,
            **self.measured(),
        )


class DemoRun(BaseRun):
    """A model under DDP, stepped by a front-end."""

    def __init__(self, way: ComparedRun, model: nn.Module, hyper: HyperParameters) -> None:
        super().__init__(way)
        # Small buckets (in MB), so that there are several and the steps overlap with backward.
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True)
        self.front_end = way.make(self.ddp, hyper)
        self.sent_bytes = 0.0

    def step_by(self, batch: text.Batch) -> tuple[float, int]:
        """Backward, whatever is left of the step, and no gradient stays."""
        loss = mean_loss(self.ddp, *batch)
        loss.backward()
        self.front_end.step()
        grads = [param.grad for param in self.ddp.parameters() if param.grad is not None]
        gradient_bytes = tensor_bytes(grads)
        self.ddp.zero_grad()
        return loss.item(), gradient_bytes

    def loss(self, batch: text.Batch) -> float:
        """Return the loss of the wrapped model: DDP's own forward would talk to the other ranks."""
        return mean_loss(self.ddp.module, *batch).item()

    def parameters(self) -> Iterable[Tensor]:
        """The model's."""
        return self.ddp.parameters()

    def finish(self) -> None:
        """Count what was sent, and make the ranks' models one."""
        world = dist.get_world_size()
        reduced = 2 * self.gradient_bytes * (world - 1) / world  # as a ring all-reduces
        self.sent_bytes = self.front_end.sent_bytes(reduced, len(self.losses))
        self.front_end.finish()

    def measured(self) -> dict[str, Any]:
        """Memory, what was sent, and how far the parameters are from those of rank 0."""
        parameters = self.flat_parameters()
        of_rank_zero = parameters.clone()
        dist.broadcast(of_rank_zero, src=0)
        return {
            "from_rank_zero": compare(parameters, of_rank_zero),
            "parameter_bytes": tensor_bytes(self.ddp.parameters()),
            "state_bytes": self.front_end.state_bytes(),
            "sent_bytes": self.sent_bytes,
        }


def compare(one: Tensor, other: Tensor) -> Difference:
    """Compare two float32 vectors, bit by bit and by value."""
    same = torch.equal(one.view(torch.int32), other.view(torch.int32))
    return Difference(same, (one - other).abs().max().item())
