"""Run of ``--front-end rpc`` with parameters on workers."""

import copy
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import rpc

from functional_optim import DistributedOptimizer
from hooks.demo import text
from hooks.demo.model import mean_loss
from hooks.demo.result import Difference, WorkerResult
from hooks.demo.run import ComparedRun, DemoRun, HyperParameters, tensor_bytes
from sharding import plan

ONE_RANK = Difference(same_bits=True, largest=0.0)
"""Difference from rank 0, for a process that trains alone."""


class WorkerRun(DemoRun):
    """DistributedOptimizer with the same options, with parameters on workers by a shard plan.

    This process keeps only the model's shapes. Each step reads a snapshot, and sends gradients.
    """

    def __init__(
        self, spec: ComparedRun, model: nn.Module, hyper: HyperParameters, workers: Sequence[str]
    ) -> None:
        super().__init__(spec, copy.deepcopy(model).to("meta"), under_ddp=False)
        shares = plan(model, len(workers), policy="greedy")
        params = [
            (
                name,
                rpc.remote(
                    workers[shares.owners(name)[0].ranks[0]], _copy_parameter, args=(param.data,)
                ),
            )
            for name, param in model.named_parameters()
        ]
        self._optimizer = DistributedOptimizer(
            torch.optim.AdamW, params, lr=1.0, betas=hyper.betas, weight_decay=hyper.weight_decay
        )
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, hyper.learning_rate)

    def train_step(self, batch: text.Batch) -> tuple[float, int]:
        snapshot = self._optimizer.snapshot()
        loss = mean_loss(partial(snapshot.run, self.module), *batch)
        grads = torch.autograd.grad(loss, list(snapshot.parameters.values()))
        self._optimizer.step(grads, snapshot)
        self._scheduler.step()
        return loss.item(), tensor_bytes(grads)

    def loss(self, batch: text.Batch) -> float:
        with self._optimizer.snapshot() as snapshot:
            return mean_loss(partial(snapshot.run, self.module), *batch).item()

    def parameters(self) -> Iterable[Tensor]:
        return self._optimizer.snapshot().parameters.values()

    def state_bytes(self) -> int:
        return 0

    def metrics(self) -> dict[str, Any]:
        workers = self._workers()
        return {
            "from_rank_zero": ONE_RANK,
            "parameter_bytes": 0,
            "state_bytes": self.state_bytes(),
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


def _copy_parameter(values: Tensor) -> nn.Parameter:
    """Return a parameter of the worker that runs this call."""
    return nn.Parameter(values.clone())


def _bytes(values: Any) -> int:
    """Return the bytes of tensor elements; tensors of one message share storage."""
    return sum(one.numel() * one.element_size() for one in values if isinstance(one, Tensor))
