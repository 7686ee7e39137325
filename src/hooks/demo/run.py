"""Compared run: a model, its optimizer, and its curves."""

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
    """Model with its optimizer, and its curves so far."""

    def __init__(self, spec: ComparedRun) -> None:
        self.spec = spec
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self.gradient_bytes = 0

    @abstractmethod
    def train_step(self, batch: text.Batch) -> tuple[float, int]:
        """Make a step; return the loss before it, and the bytes of its gradients."""

    @abstractmethod
    def loss(self, batch: text.Batch) -> float:
        """Return the current loss of this process."""

    @abstractmethod
    def parameters(self) -> Iterable[Tensor]:
        """Return the current parameters, in the order of the model."""

    @abstractmethod
    def metrics(self) -> dict[str, Any]:
        """Return the other fields of a RunResult. All ranks must call it together."""

    def step(self, batch: text.Batch) -> None:
        loss, self.gradient_bytes = self.train_step(batch)
        self.losses.append(loss)

    def finish(self) -> None:  # noqa: B027  most runs do nothing
        """End training, after the last step."""

    @torch.no_grad()
    def validate(self, batch: text.Batch) -> float:
        loss = self.loss(batch)
        self.validation.append((len(self.losses), loss))
        return loss

    def flat_parameters(self) -> Tensor:
        return torch.cat([param.detach().reshape(-1) for param in self.parameters()])

    def result(self, first: "BaseRun") -> RunResult:
        """Return the result of this rank, compared with the first run. Collective."""
        return RunResult(
            name=self.spec.name,
            title=self.spec.title,
            exact=self.spec.exact,
            spread=self.spec.spread,
            differs=self.spec.differs,
            losses=self.losses,
            validation=self.validation,
            from_first=compare(self.flat_parameters(), first.flat_parameters()),
            gradient_bytes=self.gradient_bytes,
            **self.metrics(),
        )


class DemoRun(BaseRun):
    """Model under DDP with a front-end."""

    def __init__(self, spec: ComparedRun, model: nn.Module, hyper: HyperParameters) -> None:
        super().__init__(spec)
        # Small buckets (in MB), so that there are several and the steps overlap with backward.
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True)
        self.front_end = spec.build(self.ddp, hyper)
        self.sent_bytes = 0.0

    def train_step(self, batch: text.Batch) -> tuple[float, int]:
        loss = mean_loss(self.ddp, *batch)
        loss.backward()
        self.front_end.step()
        grads = [param.grad for param in self.ddp.parameters() if param.grad is not None]
        gradient_bytes = tensor_bytes(grads)
        self.ddp.zero_grad()
        return loss.item(), gradient_bytes

    def loss(self, batch: text.Batch) -> float:
        """Return the loss of the wrapped model: DDP's own forward would call collectives."""
        return mean_loss(self.ddp.module, *batch).item()

    def parameters(self) -> Iterable[Tensor]:
        return self.ddp.parameters()

    def finish(self) -> None:
        """Count the sent bytes, and make the models of all ranks equal."""
        world = dist.get_world_size()
        reduced = 2 * self.gradient_bytes * (world - 1) / world  # of a ring all-reduce
        self.sent_bytes = self.front_end.sent_bytes(reduced, len(self.losses))
        self.front_end.finish()

    def metrics(self) -> dict[str, Any]:
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
    """Compare two float32 vectors, bit for bit and by value."""
    same = torch.equal(one.view(torch.int32), other.view(torch.int32))
    return Difference(same, (one - other).abs().max().item())
