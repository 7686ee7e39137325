"""The model of a drawn case."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .cases import DTYPES, Case, Drawn, is_used

LARGEST = 8
"""Largest exact gradient; sums of such whole numbers are exact in every dtype of the cases."""


class Part(nn.Module):
    """Module with some of the parameters; its forward waits for these parameters."""

    def __init__(self, numbers: list[int], tensors: list[nn.Parameter]) -> None:
        super().__init__()
        self.numbers = numbers
        for number, tensor in zip(numbers, tensors, strict=True):
            self.register_parameter(f"p{number}", tensor)

    def forward(self, slopes: Mapping[int, Tensor], bend: float) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for number in self.numbers:
            if number in slopes:
                param = self.get_parameter(f"p{number}")
                value = (param * slopes[number]).sum()
                if bend:
                    value = value + (param * param).sum() * bend
                total = total + value.to(torch.float64)
        return total


class Model(nn.Module):
    """Model with the parameters of a case; gradients depend on rank and iteration."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        chance = torch.Generator().manual_seed(case.seed)
        runs: list[list[int]] = []
        for number, one in enumerate(case.params):
            if not (one.beside and runs):
                runs.append([])
            runs[-1].append(number)
        self.parts = nn.ModuleList(
            Part(run, [_parameter(case.params[number], chance) for number in run]) for run in runs
        )

    def forward(self, rank: int, iteration: int, part: int) -> Tensor:
        slopes = {
            number: self._slope(one, number, rank, iteration, part)
            for number, one in enumerate(self.case.params)
            if is_used(one.used, rank, iteration + part)
        }
        bend = 0.0 if self.case.exact else 0.25
        total = torch.zeros((), dtype=torch.float64)
        for module in self.parts:
            total = total + module(slopes, bend)
        return total

    def _slope(self, one: Drawn, number: int, rank: int, iteration: int, part: int) -> Tensor:
        seed = self.case.seed + 7 * number + 1_000 * rank + 10_000 * iteration + 100_000 * part
        chance = torch.Generator().manual_seed(seed)
        if self.case.exact:
            value = torch.randint(-LARGEST, LARGEST + 1, tuple(one.shape), generator=chance)
        else:
            value = torch.randn(tuple(one.shape), generator=chance)
        return value.to(DTYPES[one.dtype])


def _parameter(one: Drawn, chance: torch.Generator) -> nn.Parameter:
    value = torch.randn(tuple(one.shape), generator=chance).to(DTYPES[one.dtype])
    if one.turned and value.dim() > 1:
        value = value.t().contiguous().t()
    return nn.Parameter(value, requires_grad=not one.frozen)
