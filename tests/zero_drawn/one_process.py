"""Process that computes what all ranks of a case compute."""

import functools
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from functional_optim import Optimizer
from functional_optim.core.torch_state import to_entries
from functional_optim.storage.conversion import decode_entries, plain_form

from .cases import OPTIMIZERS, Case
from .model import Model


def added(terms: list[Tensor]) -> Tensor:
    """Add terms in order; bfloat16 terms are added in float32 and rounded once."""
    if terms[0].dtype == torch.bfloat16:
        return functools.reduce(torch.add, [one.float() for one in terms]).to(torch.bfloat16)
    return functools.reduce(torch.add, terms)


def options_of(case: Case, optimizer: Optimizer, group: int, iteration: int) -> dict[str, float]:
    """Return the hyper-parameters of a group in an iteration."""
    told, hyper = case.groups[group], optimizer.hyper
    found = {key: hyper[key] * getattr(told, key) for key in told._fields}
    if case.changes is not None and iteration >= case.changes:
        found = {"lr": found["lr"] * 0.5, "weight_decay": 0.0 if group else found["weight_decay"]}
    return found


def named(case: Case, module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the named parameters, in the order of the model."""
    found = dict(module.named_parameters())
    assert len(found) == len(case.params)
    return found


def grouped(
    case: Case, module: nn.Module, optimizer: Optimizer
) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the indices of the groups with parameters, and these groups for ZeRO."""
    numbers, groups = [], []
    pairs = list(zip(case.params, named(case, module).items(), strict=True))
    for number in range(len(case.groups)):
        own = [pair for one, pair in pairs if one.group == number and not one.left]
        if own:
            numbers.append(number)
            groups.append({"params": own, **options_of(case, optimizer, number, 0)})
    return numbers, groups


class Alone:
    """Process that computes the gradients of all ranks, and steps by the pure core."""

    def __init__(self, case: Case, module: Model) -> None:
        self.case, self.module = case, module
        self.optimizer = OPTIMIZERS[case.optimizer].oracle
        # Parameters are ordered by group, because sums over gradients follow this order.
        _, groups = grouped(case, module, self.optimizer)
        pairs = [pair for group in groups for pair in group["params"]]
        self.params = OrderedDict((name, param) for name, param in pairs if param.requires_grad)
        every = named(case, module)
        self.groups = {name: one.group for name, one in zip(every, case.params, strict=True)}
        self.state = self._at(0).init(self.params)
        self.used: list[list[str]] = []

    def _at(self, iteration: int) -> Optimizer:
        found = self.optimizer
        for name in self.params:
            options = options_of(self.case, self.optimizer, self.groups[name], iteration)
            found = found.override((name,), **options)
        return found

    def gradients(self, iteration: int) -> tuple[dict[str, Tensor | None], list[float]]:
        """Return the mean of the ranks' gradients, added in rank order, and the ranks' losses."""
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        terms: dict[str, list[Tensor]] = {name: [] for name in trained}
        used: set[str] = set()
        losses = []
        for rank in range(self.case.ranks):
            self.module.zero_grad()
            losses.append(self._backward(rank, iteration))
            for name, param in trained.items():
                used |= {name} if param.grad is not None else set()
                grad = torch.zeros_like(param) if param.grad is None else param.grad
                terms[name].append(grad / self.case.ranks)
        total = {name: added(own) if name in used else None for name, own in terms.items()}
        return total, losses

    def entries(self, name: str) -> dict[str, Tensor]:
        """Return the state of a parameter as in torch.optim."""
        stages, hypers = self.optimizer.stages, self.optimizer.hypers_at((name,))
        param = self.params[name]
        entries = to_entries(stages, hypers, param, self.state.leaves[name])
        form = plain_form(stages, hypers, param.shape, param.dtype)
        return decode_entries(entries, form.dtypes) if form.stored else entries

    def _backward(self, rank: int, iteration: int) -> float:
        parts, total = self.case.parts(iteration), 0.0
        for part in range(parts):
            loss = self.module(rank, iteration, part) / parts
            loss.backward()
            total += loss.item()
        return total

    def step(self, gradients: Mapping[str, Tensor | None], iteration: int) -> None:
        grads = OrderedDict((name, gradients[name]) for name in self.params)
        self.used.append([name for name, grad in grads.items() if grad is not None])
        with torch.no_grad():
            params, self.state = self._at(iteration).update(self.params, grads, self.state)
            for name, param in self.params.items():
                param.copy_(params[name])
