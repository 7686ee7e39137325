"""Trainings of a few ranks, drawn and printed by Hypothesis, with an averager under test."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from hooks.averaging import ModelAverager

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (0, 2), (3,), (2, 3))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
RATE = 0.25
MOST_RANKS = 4

Factory = Callable[..., ModelAverager]
"""``factory(params, group, **options)`` returns an averager of a rank's parameters."""


@dataclass(frozen=True)
class AveragerSubject:
    """Averager under test, with the arguments of :func:`~hooks.testing.check_averager`."""

    factory: Factory
    options: st.SearchStrategy[dict[str, Any]] = field(default_factory=lambda: st.just({}))
    dtypes: tuple[torch.dtype, ...] = DTYPES
    due: Callable[..., bool] | None = None
    agree: bool = True
    mean: bool = False
    oracle: Factory | None = None
    every_step: Mapping[str, Any] | None = None
    ulps: float = 0.0
    same_steps: int = 0


@dataclass(frozen=True)
class Training:
    """Training of ranks with equal first parameters and different data, with an averager's options.

    The loss of rank ``r`` at step ``t`` is ``|x - c|^2 / 2`` with ``c`` of this rank and step. The
    local step is ``x <- x - (x - c) / 4``.
    """

    options: tuple[tuple[str, Any], ...]
    dtype: torch.dtype
    ranks: int
    shapes: tuple[tuple[int, ...], ...]
    steps: int
    cut: int
    """The step after which some laws stop the training, or add a rank."""
    seed: int
    """The seed of all random numbers."""

    @property
    def kwargs(self) -> dict[str, Any]:
        """The options as keyword arguments."""
        return dict(self.options)

    def start(self) -> list[Tensor]:
        """Return the first parameters, equal on all ranks."""
        return self._numbers(0)

    def centers(self, rank: int, step: int) -> list[Tensor]:
        """Return the minimum of a rank's loss at a step."""
        return self._numbers(1 + rank + MOST_RANKS * 2 * step)

    def ulp(self) -> float:
        """Return a unit in the last place of the largest number of the training."""
        steps = (self.centers(rank, s) for rank in range(self.ranks) for s in range(self.steps))
        largest = [
            one.abs().max() for some in (self.start(), *steps) for one in some if one.numel()
        ]
        return torch.finfo(self.dtype).eps * max(map(float, largest), default=0.0)

    def smaller(self) -> Iterator["Training"]:
        """Return trainings with one rank, parameter or step fewer."""
        if self.ranks > 1:
            yield replace(self, ranks=self.ranks - 1)
        for index in range(len(self.shapes) if len(self.shapes) > 1 else 0):
            yield replace(self, shapes=self.shapes[:index] + self.shapes[index + 1 :])
        if self.steps > 1:
            yield replace(self, steps=self.steps - 1, cut=min(self.cut, self.steps - 2))

    def _numbers(self, which: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + which)
        wide = torch.complex128 if self.dtype.is_complex else torch.float64
        return [
            torch.randn(shape, generator=generator, dtype=wide).to(self.dtype)
            for shape in self.shapes
        ]

    def __str__(self) -> str:
        shapes = ", ".join(map(str, self.shapes))
        return (
            f"options: {self.kwargs}\nranks:   {self.ranks}\ndtype:   {self.dtype}\n"
            f"shapes:  {shapes}\nsteps:   {self.steps}, stopped or joined after {self.cut}\n"
            f"seed:    {self.seed}"
        )


@st.composite
def trainings(
    draw: st.DrawFn,
    options: st.SearchStrategy[dict[str, Any]],
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> Training:
    """Draw a :class:`Training`.

    Args:
        draw: passed by Hypothesis.
        options: keyword arguments of the averager.
        dtypes: of the parameters; all parameters of a training have the same dtype.
    """
    steps = draw(st.integers(1, 9))
    return Training(
        options=tuple(sorted(draw(options).items())),
        dtype=draw(st.sampled_from(dtypes)),
        ranks=draw(st.integers(1, MOST_RANKS)),
        shapes=tuple(draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3))),
        steps=steps,
        cut=draw(st.integers(0, steps - 1)),
        seed=draw(st.integers(0, 99)),
    )


class Replica:
    """Rank of a training, with the averager under test."""

    def __init__(self, subject: AveragerSubject, training: Training, group: Any) -> None:
        self._training, self._same_steps = training, subject.same_steps
        self._rank = group.rank()
        start = training.start()
        ends = list(accumulate(one.numel() for one in start))
        self.flat = torch.cat([one.reshape(-1) for one in start])
        """All parameters, in one tensor that they are views of."""
        self.params = [
            nn.Parameter(self.flat[end - one.numel() : end].view(one.shape))
            for end, one in zip(ends, start, strict=True)
        ]
        self.averager = subject.factory(self.params, group, **training.kwargs)

    def step(self, step: int) -> None:
        rank = 0 if step < self._same_steps else self._rank
        for param, center in zip(self.params, self._training.centers(rank, step), strict=True):
            param.data.sub_((param.data - center) * RATE)

    def average(self) -> None:
        self.averager.average_parameters(self.params)

    def train(self, start: int = 0, stop: int | None = None) -> Iterator[int]:
        """Make local steps and average after each; yield the number of each step."""
        for step in range(start, self._training.steps if stop is None else stop):
            self.step(step)
            self.average()
            yield step

    def values(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.params]

    def saved(self) -> Any:
        return self.values(), self.averager.state_dict()

    def load(self, saved: Any) -> None:
        values, state = saved
        for param, value in zip(self.params, values, strict=True):
            param.data.copy_(value)
        self.averager.load_state_dict(state)
