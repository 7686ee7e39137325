"""Runs that Hypothesis draws and prints: a few small parameters, and their gradients."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from functional_optim.core.state import State
from functional_optim.optimizer import Optimizer

Shape = tuple[int, ...]

SMALL_SHAPES: tuple[Shape, ...] = ((), (1,), (0,), (3,), (2, 2), (2, 0, 3))
LAYOUTS = ("contiguous", "transposed", "sliced", "channels_last")
LARGE_SHAPE = (70_001,)
WIDE_SHAPE = (33, 17)
"""Rows longer than a vector register, to test how kernels use strides."""
USUAL_SHAPES: tuple[Shape, ...] = (*SMALL_SHAPES, (1, 2, 1, 2))
MATRIX_SHAPES: tuple[Shape, ...] = ((1, 1), (2, 2), (3, 1), (2, 3), (0, 3), WIDE_SHAPE)
MAX_STEPS = 4
"""Default of the largest number of steps in a run."""
REAL_DTYPES = (torch.float32, torch.float64, torch.bfloat16)

Params = dict[str, Tensor]
Grads = dict[str, Tensor | None]


@dataclass(frozen=True)
class Values:
    """Values of one tensor: a list, or for a large tensor the ``seed`` of normal numbers.

    Example::

        >>> Values((1.0, 2.0)).fill((2,), torch.float32)
        tensor([1., 2.])
    """

    numbers: tuple[float, ...] = ()
    seed: int | None = None

    def fill(self, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Tensor:
        """Return a tensor with these values, which are the same on all devices."""
        count = torch.Size(shape).numel()
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed)
            wide = torch.randn(shape, generator=generator, dtype=torch.float64)
        else:
            wide = torch.tensor(self.numbers, dtype=torch.float64)
            if dtype.is_complex:
                wide = torch.complex(wide[:count], wide[count:])
            wide = wide[:count].reshape(shape)
        return wide.to(dtype).to(device)

    def simpler(self) -> Iterator["Values"]:
        """Return values with 0 for all listed numbers, or for one of them; then with 1."""
        for rank, simple in enumerate((0.0, 1.0)):
            places = [i for i, number in enumerate(self.numbers) if _rank(number) > rank]
            for chosen in [places, *([place] for place in places)] if places else []:
                numbers = list(self.numbers)
                for place in chosen:
                    numbers[place] = simple
                yield replace(self, numbers=tuple(numbers))


def _rank(number: float) -> int:
    """Return the complexity of a number: 0 for 0.0, 1 for 1.0, 2 for other numbers and -0.0."""
    return {"0.0": 0, "1.0": 1}.get(repr(number), 2)


@dataclass(frozen=True)
class LeafSpec:
    """Parameter of a run: shape, layout in memory (see :func:`laid_out`), and first values.

    Example::

        >>> LeafSpec((2,), "contiguous", Values((1.0, 2.0))).shape
        (2,)
    """

    shape: tuple[int, ...]
    layout: str
    start: Values


@dataclass(frozen=True)
class Run:
    """Options of an optimizer, parameters, and a gradient or None for each parameter and step.

    Example::

        >>> leaf = LeafSpec((1,), "contiguous", Values((1.0,)))
        >>> run = Run((("lr", 0.1),), torch.float32, (leaf,), ((Values((2.0,)),), (None,)))
        >>> run.params(), run.grads()
        ({'a': tensor([1.])}, [{'a': tensor([2.])}, {'a': None}])
    """

    options: tuple[tuple[str, Any], ...]
    dtype: torch.dtype
    leaves: tuple[LeafSpec, ...]
    steps: tuple[tuple[Values | None, ...], ...]
    device: str = "cpu"
    """Device of all tensors."""
    given_names: tuple[str, ...] = ()
    """Names of the first parameters."""

    @property
    def kwargs(self) -> dict[str, Any]:
        """The options as keyword arguments."""
        return dict(self.options)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters: the given names, then a, b, c, ..."""
        others = (one for one in "abcdefgh" if one not in self.given_names)
        return tuple(islice(chain(self.given_names, others), len(self.leaves)))

    def params(self) -> Params:
        """Return new parameters, with the specified strides."""
        return {
            name: laid_out(leaf.start.fill(leaf.shape, self.dtype, self.device), leaf.layout)
            for name, leaf in zip(self.names, self.leaves, strict=True)
        }

    def grads(self) -> list[Grads]:
        """Return new contiguous gradients, one dict per step."""
        return [
            {
                name: None if values is None else values.fill(leaf.shape, self.dtype, self.device)
                for name, leaf, values in zip(self.names, self.leaves, step, strict=True)
            }
            for step in self.steps
        ]

    def smaller(self) -> Iterator["Run"]:
        """Return runs with one leaf less, one step less, or simpler numbers."""
        for i in range(len(self.leaves) if len(self.leaves) > 1 else 0):
            steps = tuple(step[:i] + step[i + 1 :] for step in self.steps)
            yield replace(self, leaves=self.leaves[:i] + self.leaves[i + 1 :], steps=steps)
        for i in range(len(self.steps) if len(self.steps) > 1 else 0):
            yield replace(self, steps=self.steps[:i] + self.steps[i + 1 :])
        for i, leaf in enumerate(self.leaves):
            for start in leaf.start.simpler():
                changed = replace(leaf, start=start)
                yield replace(self, leaves=(*self.leaves[:i], changed, *self.leaves[i + 1 :]))
        for k, step in enumerate(self.steps):
            for i, values in enumerate(step):
                for simpler in () if values is None else values.simpler():
                    other = (*step[:i], simpler, *step[i + 1 :])
                    yield replace(self, steps=(*self.steps[:k], other, *self.steps[k + 1 :]))

    def replay(self, optimizer: Optimizer) -> tuple[Params, State]:
        """Return parameters and state after the run, by ``update`` of an optimizer."""
        return replay_steps(optimizer, self.params(), self.grads())

    def __str__(self) -> str:
        def shown(tensor: Tensor | None) -> str:
            if tensor is None:
                return "None"
            if tensor.numel() > 16:
                return f"<{tensor.numel()} normal numbers>"
            return str(tensor.tolist())

        where = "" if self.device == "cpu" else f" on {self.device}"
        lines = [f"options: {self.kwargs}", f"dtype:   {self.dtype}{where}"]
        for (name, param), leaf in zip(self.params().items(), self.leaves, strict=True):
            lines.append(f"param {name}: {shown(param)}  (shape {leaf.shape}, {leaf.layout})")
        for number, grads in enumerate(self.grads(), start=1):
            gradients = ", ".join(f"{name}: {shown(grad)}" for name, grad in grads.items())
            lines.append(f"step {number}:  {gradients}")
        return "\n".join(lines)


def replay_steps(optimizer: Optimizer, params: Params, grads: list[Grads]) -> tuple[Params, State]:
    """Return parameters and state after all steps, by ``update``."""
    return replay_path(optimizer, params, grads)[-1]


def replay_path(
    optimizer: Optimizer, params: Params, grads: list[Grads]
) -> list[tuple[Params, State]]:
    """Return parameters and state before the first step and after each step, by ``update``."""
    path = [(params, optimizer.init(params))]
    for one in grads:
        params, state = path[-1]
        path.append(optimizer.update(params, one, state))
    return path


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return the values with other strides, if the shape allows them.

    Args:
        tensor: the values.
        layout: "contiguous", "transposed", "sliced" or "channels_last".

    Example::

        >>> laid_out(torch.zeros(2, 3), "transposed").stride()
        (1, 2)
    """
    if layout == "transposed" and tensor.dim() >= 2:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "sliced" and tensor.dim() >= 1:
        room = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
        return room[..., ::2].copy_(tensor)
    if layout == "channels_last" and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def numbers(count: int) -> st.SearchStrategy[Values]:
    """Return a strategy for the values of a small tensor: moderate numbers, zeros, both signs."""
    one = st.one_of(
        st.floats(-8.0, 8.0, width=16, allow_subnormal=False),
        st.sampled_from([1e-4, -1e-4, 1e-8, -1e-8, -0.0]),
    )
    return st.builds(Values, st.tuples(*[one] * count))


@st.composite
def runs(
    draw: st.DrawFn,
    options: st.SearchStrategy[dict[str, Any]],
    dtypes: tuple[torch.dtype, ...] = REAL_DTYPES,
    *,
    max_steps: int = MAX_STEPS,
    missing: bool = True,
    large: bool = True,
    shapes: tuple[Shape, ...] = USUAL_SHAPES,
    device: str = "cpu",
    names: tuple[str, ...] = (),
) -> Run:
    """Draw a :class:`Run`.

    Args:
        draw: passed by Hypothesis.
        options: keyword arguments of the optimizer.
        dtypes: of the parameters. A run has one dtype.
        max_steps: largest number of steps.
        missing: True if gradients may be None.
        large: True if parameters may have :data:`LARGE_SHAPE`, which is more than one block of a
            kernel, or :data:`WIDE_SHAPE`.
        shapes: all other shapes.
        device: of all tensors.
        names: of the first parameters.

    Returns:
        A strategy of Hypothesis: call ``runs`` without ``draw``.

    Example::

        >>> import hypothesis
        >>> @hypothesis.given(runs(st.just({})))
        ... @hypothesis.settings(max_examples=3, deadline=None)
        ... def has_at_least_one_parameter(run):
        ...     assert run.params()
        >>> has_at_least_one_parameter()
    """
    dtype = draw(st.sampled_from(dtypes))
    factor = 2 if dtype.is_complex else 1
    shape = st.sampled_from(shapes)
    if large:
        shape = st.one_of(st.just(LARGE_SHAPE), st.just(WIDE_SHAPE), shape)
    count = draw(st.integers(1, max_steps))
    # A leaf is drawn with its gradients, so that shrinking can drop one leaf.
    drawn = draw(st.lists(_leaf(shape, factor, count, missing), min_size=1, max_size=3))
    steps = tuple(zip(*(gradients for _, gradients in drawn), strict=True))
    leaves = tuple(leaf for leaf, _ in drawn)
    return Run(tuple(sorted(draw(options).items())), dtype, leaves, steps, device, names)


@st.composite
def _leaf(
    draw: st.DrawFn,
    shapes: st.SearchStrategy[tuple[int, ...]],
    factor: int,
    steps: int,
    missing: bool,
) -> tuple[LeafSpec, tuple[Values | None, ...]]:
    """Draw a parameter and its gradients."""
    shape = draw(shapes)
    layout = draw(st.sampled_from(LAYOUTS if shape else LAYOUTS[:1]))
    start = draw(_values(shape, factor))
    gradients = tuple(
        None if missing and draw(st.integers(0, 3)) == 3 else draw(_values(shape, factor))
        for _ in range(steps)
    )
    return LeafSpec(shape, layout, start), gradients


def _values(shape: tuple[int, ...], factor: int) -> st.SearchStrategy[Values]:
    count = torch.Size(shape).numel()
    if count > 16:
        return st.builds(Values, st.just(()), st.integers(0, 99))
    return numbers(count * factor)
