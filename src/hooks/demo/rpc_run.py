"""The runs that ``--front-end rpc`` compares: parameters in this process, and on workers."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import rpc

from functional_optim import DistributedOptimizer
from hooks.demo import text
from hooks.demo.front_ends import HyperParameters, state_bytes, tensor_bytes
from hooks.demo.model import mean_loss
from hooks.demo.result import Difference, RunResult, WorkerResult
from hooks.demo.run import compare
from sharding import plan


class Holder(Protocol):
    """Who has a run's parameters and steps them."""

    def step(self, batch: text.Batch) -> tuple[float, int]:
        """One step; the loss before it, and the bytes of its gradients."""

    def loss(self, batch: text.Batch) -> float:
        """The loss as it is now."""

    def parameters(self) -> Sequence[Tensor]:
        """As they are now, in the order of the model's."""

    def held_bytes(self) -> tuple[int, int]:
        """The bytes of parameters and of optimizer state that this process keeps."""

    def workers(self) -> list[WorkerResult]:
        """Those that keep the rest."""


class InThisProcess:
    """torch.optim.AdamW, with a scheduler, on a model of this process."""

    def __init__(self, model: nn.Module, hyper: HyperParameters) -> None:
        self._model = model
        self._params = list(model.parameters())
        # The base rate is 1, so that the scheduler's product is exactly the schedule's value.
        self._optimizer = torch.optim.AdamW(
            self._params,
            lr=1.0,
            betas=hyper.betas,
            weight_decay=hyper.weight_decay,
            foreach=False,
        )
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, hyper.learning_rate)

    def step(self, batch: text.Batch) -> tuple[float, int]:
        """Gradients, and a step by them."""
        loss = mean_loss(self._model, *batch)
        grads = torch.autograd.grad(loss, self._params)
        for param, grad in zip(self._params, grads, strict=True):
            param.grad = grad
        self._optimizer.step()
        self._scheduler.step()
        return loss.item(), tensor_bytes(grads)

    def loss(self, batch: text.Batch) -> float:
        """The loss as it is now."""
        return mean_loss(self._model, *batch).item()

    def parameters(self) -> Sequence[Tensor]:
        """The model's."""
        return self._params

    def held_bytes(self) -> tuple[int, int]:
        """All there is."""
        return tensor_bytes(self._params), state_bytes(self._optimizer)

    def workers(self) -> list[WorkerResult]:
        """None."""
        return []


class OnWorkers:
    """DistributedOptimizer with the same options: a plan says which worker has which parameter.

    This process keeps the model's shapes. For each step it reads a snapshot, and sends gradients.

    Args:
        model: of whose parameters the workers get copies.
        hyper: AdamW's.
        workers: the names of their processes.
    """

    def __init__(self, model: nn.Module, hyper: HyperParameters, workers: Sequence[str]) -> None:
        placed = plan(model, len(workers), policy="greedy")
        params = [
            (name, rpc.remote(workers[placed.owners(name)[0].ranks[0]], _own, args=(param.data,)))
            for name, param in model.named_parameters()
        ]
        self._shapes = copy.deepcopy(model).to("meta")
        self._optimizer = DistributedOptimizer(
            torch.optim.AdamW, params, lr=1.0, betas=hyper.betas, weight_decay=hyper.weight_decay
        )
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, hyper.learning_rate)

    def step(self, batch: text.Batch) -> tuple[float, int]:
        """Parameters come from the workers, and gradients go to them."""
        snapshot = self._optimizer.snapshot()
        loss = mean_loss(partial(snapshot.run, self._shapes), *batch)
        grads = torch.autograd.grad(loss, list(snapshot.parameters.values()))
        self._optimizer.step(grads, snapshot)
        self._scheduler.step()
        return loss.item(), tensor_bytes(grads)

    def loss(self, batch: text.Batch) -> float:
        """The loss as it is now."""
        with self._optimizer.snapshot() as snapshot:
            return mean_loss(partial(snapshot.run, self._shapes), *batch).item()

    def parameters(self) -> Sequence[Tensor]:
        """The workers'."""
        return list(self._optimizer.snapshot().parameters.values())

    def held_bytes(self) -> tuple[int, int]:
        """Nothing between steps."""
        return 0, 0

    def workers(self) -> list[WorkerResult]:
        """All of them."""
        saved, counters = self._optimizer.state_dict(), self._optimizer.counters()
        names = saved["param_groups"][0]["param_names"]
        params = dict(zip(names, self.parameters(), strict=True))
        states = {name: saved["state"][number] for number, name in enumerate(names)}
        return [
            WorkerResult(
                name=worker,
                parameter_bytes=_bytes(params[name] for name in own),
                state_bytes=sum(_bytes(states[name].values()) for name in own),
                steps=counters[worker].steps,
                gradient_bytes=counters[worker].gradient_bytes,
                read_bytes=counters[worker].read_bytes,
            )
            for worker, own in saved["workers"].items()
        ]


class RpcWay(NamedTuple):
    """One of the runs that are compared."""

    name: str
    """A letter, for tables."""
    title: str
    """What steps it."""


class RpcRun:
    """A way of stepping the model, and its curves so far."""

    def __init__(self, way: RpcWay, holder: Holder) -> None:
        self.way = way
        self.holder = holder
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self.gradient_bytes = 0

    def step(self, batch: text.Batch) -> None:
        """One step of training."""
        loss, self.gradient_bytes = self.holder.step(batch)
        self.losses.append(loss)

    def finish(self) -> None:
        """Nothing: a step is made when it returns."""

    @torch.no_grad()
    def validate(self, batch: text.Batch) -> float:
        """Take the validation loss."""
        loss = self.holder.loss(batch)
        self.validation.append((len(self.losses), loss))
        return loss

    def flat_parameters(self) -> Tensor:
        """A copy of all parameters, as one vector."""
        return torch.cat([param.detach().reshape(-1) for param in self.holder.parameters()])

    def result(self, first: "RpcRun") -> RunResult:
        """What was measured.

        Args:
            first: the run that this one is compared with.
        """
        parameters, state = self.holder.held_bytes()
        workers = self.holder.workers()
        return RunResult(
            name=self.way.name,
            title=self.way.title,
            exact=True,
            spread=0.0,
            differs="",
            losses=self.losses,
            validation=self.validation,
            from_first=compare(self.flat_parameters(), first.flat_parameters()),
            from_rank_zero=Difference(same_bits=True, largest=0.0),
            parameter_bytes=parameters,
            gradient_bytes=self.gradient_bytes,
            state_bytes=state,
            sent_bytes=float(sum(one.gradient_bytes for one in workers)),
            workers=workers,
        )


def _own(values: Tensor) -> nn.Parameter:
    """A parameter of the worker on which this is called."""
    return nn.Parameter(values.clone())


def _bytes(values: Any) -> int:
    """Of the elements of tensors: those of a message share their memory."""
    return sum(one.numel() * one.element_size() for one in values if isinstance(one, Tensor))
