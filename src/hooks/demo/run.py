"""Compared run: a model, its optimizer, and its curves."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hooks.demo import text
from hooks.demo.model import mean_loss
from hooks.demo.result import Difference, RunResult

LOSS_SPREAD = 0.001
"""Largest relative difference from A's validation loss for another order of sums.

Rounding alone causes about a thousandth of this, for 3 ranks and 400 steps.
"""


class HyperParameters(NamedTuple):
    """Hyper-parameters of AdamW, equal for all runs."""

    learning_rate: Callable[[float], float]  # of the number of steps made
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1


class ComparedRun(NamedTuple):
    """Run that is compared with others."""

    name: str
    """A letter, for tables."""
    title: str
    """The optimizer, for tables."""
    build: Callable[..., "DemoRun"]
    """Builds the run from (spec, model, hyper)."""
    exact: bool
    """True if the run must equal the first bit for bit: equal sums in equal order."""
    spread: float = LOSS_SPREAD
    """If not exact: the largest relative difference of the last validation losses."""
    differs: str = ""
    """Why the run is not exact."""


class DemoRun(ABC):
    """Model of this process, a way to step it, and its curves so far.

    To add a front-end, derive from this class, and add its runs to
    :data:`hooks.demo.front_ends.FRONT_ENDS`.

    Args:
        spec: of the run.
        model: the model.
        under_ddp: True to reduce gradients over all ranks at each step.
    """

    def __init__(self, spec: ComparedRun, model: nn.Module, *, under_ddp: bool = True) -> None:
        self.spec = spec
        self.module = self.model = model
        self.ranks = dist.get_world_size() if under_ddp else 1
        if under_ddp:
            # Small buckets (in MB), so that there are several and the steps overlap with backward.
            self.model = DistributedDataParallel(
                model, bucket_cap_mb=1, gradient_as_bucket_view=True
            )
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self.gradient_bytes = 0

    @abstractmethod
    def state_bytes(self) -> int:
        """Return the memory of this rank's optimizer state."""

    def finish_step(self) -> None:  # noqa: B027  a hook has stepped
        """Do the rest of a step, after each backward."""

    def finish(self) -> None:  # noqa: B027  most ranks have equal models
        """Make the models of all ranks equal, after the last step."""

    def sent_bytes(self, reduced: float, steps: int) -> float:
        """Return the bytes that this rank has sent to other hosts.

        Args:
            reduced: bytes that a rank sends for an all-reduce of all gradients.
            steps: number of steps so far.
        """
        return reduced * steps

    def train_step(self, batch: text.Batch) -> tuple[float, int]:
        """Make a step; return the loss before it, and the bytes of its gradients."""
        loss = mean_loss(self.model, *batch)
        loss.backward()
        self.finish_step()
        grads = [param.grad for param in self.parameters() if param.grad is not None]
        gradient_bytes = tensor_bytes(grads)
        self.model.zero_grad()
        return loss.item(), gradient_bytes

    def loss(self, batch: text.Batch) -> float:
        """Return the current loss of this process: DDP's own forward would call collectives."""
        return mean_loss(self.module, *batch).item()

    def parameters(self) -> Iterable[Tensor]:
        """Return the current parameters, in the order of the model."""
        return self.module.parameters()

    def metrics(self) -> dict[str, Any]:
        """Return the other fields of a RunResult. All ranks must call it together."""
        parameters = self.flat_parameters()
        of_rank_zero = parameters.clone()
        if self.ranks > 1:
            dist.broadcast(of_rank_zero, src=0)
        reduced = 2 * self.gradient_bytes * (self.ranks - 1) / self.ranks  # of a ring all-reduce
        return {
            "from_rank_zero": compare(parameters, of_rank_zero),
            "parameter_bytes": tensor_bytes(self.parameters()),
            "state_bytes": self.state_bytes(),
            "sent_bytes": self.sent_bytes(reduced, len(self.losses)),
        }

    def step(self, batch: text.Batch) -> None:
        loss, self.gradient_bytes = self.train_step(batch)
        self.losses.append(loss)

    @torch.no_grad()
    def validate(self, batch: text.Batch) -> float:
        loss = self.loss(batch)
        self.validation.append((len(self.losses), loss))
        return loss

    def flat_parameters(self) -> Tensor:
        return torch.cat([param.detach().reshape(-1) for param in self.parameters()])

    def result(self, first: "DemoRun") -> RunResult:
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


def compare(one: Tensor, other: Tensor) -> Difference:
    """Compare two float32 vectors, bit for bit and by value."""
    same = torch.equal(one.view(torch.int32), other.view(torch.int32))
    return Difference(same, (one - other).abs().max().item())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the memory of the tensors in an optimizer's ``state``."""
    return tensor_bytes(
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the memory of the storages of these tensors, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
