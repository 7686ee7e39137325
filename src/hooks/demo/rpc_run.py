"""The runs that ``--front-end rpc`` compares: parameters in this process, and on workers."""

import copy
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import rpc

from functional_optim import DistributedOptimizer
from hooks.demo import text
from hooks.demo.front_ends import (
    ComparedRun,
    HyperParameters,
    state_bytes,
    tensor_bytes,
    torch_adamw,
)
from hooks.demo.model import mean_loss
from hooks.demo.result import Difference, WorkerResult
from hooks.demo.run import BaseRun
from sharding import plan

ONE_RANK = Difference(same_bits=True, largest=0.0)
"""Of a process that trains alone, from rank 0."""


class InThisProcess(BaseRun):
    """torch.optim.AdamW, with a scheduler, on a model of this process."""

    def __init__(self, way: ComparedRun, model: nn.Module, hyper: HyperParameters) -> None:
        super().__init__(way)
        self._model = model
        self._params = list(model.parameters())
        self._optimizer, self._scheduler = torch_adamw(self._params, hyper)

    def step_by(self, batch: text.Batch) -> tuple[float, int]:
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

    def parameters(self) -> Iterable[Tensor]:
        """The model's."""
        return self._params

    def measured(self) -> dict[str, Any]:
        """All is here, and nothing is sent."""
        return {
            "from_rank_zero": ONE_RANK,
            "parameter_bytes": tensor_bytes(self._params),
            "state_bytes": state_bytes(self._optimizer),
            "sent_bytes": 0.0,
        }


class OnWorkers(BaseRun):
    """DistributedOptimizer with the same options: a plan says which worker has which parameter.

    This process keeps the model's shapes. For each step it reads a snapshot, and sends gradients.

    Args:
        way: how it is called.
        model: of whose parameters the workers get copies.
        hyper: AdamW's.
        workers: the names of their processes.
    """

    def __init__(
        self, way: ComparedRun, model: nn.Module, hyper: HyperParameters, workers: Sequence[str]
    ) -> None:
        super().__init__(way)
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

    def step_by(self, batch: text.Batch) -> tuple[float, int]:
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

    def parameters(self) -> Iterable[Tensor]:
        """The workers'."""
        return self._optimizer.snapshot().parameters.values()

    def measured(self) -> dict[str, Any]:
        """Nothing stays here between steps; workers have all."""
        workers = self._workers()
        return {
            "from_rank_zero": ONE_RANK,
            "parameter_bytes": 0,
            "state_bytes": 0,
            "sent_bytes": float(sum(one.gradient_bytes for one in workers)),
            "workers": workers,
        }

    def _workers(self) -> list[WorkerResult]:
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


def _own(values: Tensor) -> nn.Parameter:
    """A parameter of the worker on which this is called."""
    return nn.Parameter(values.clone())


def _bytes(values: Any) -> int:
    """Return the bytes of the tensors' elements: tensors of one message share memory."""
    return sum(one.numel() * one.element_size() for one in values if isinstance(one, Tensor))
