"""One flat buffer of a bound optimizer: its state, its step counts, and the lanes to be stepped."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.executors.lanes import tensors_of, with_tensors
from functional_optim.executors.leaf import Leaf
from functional_optim.flat_layout import FlatBuffer, Segment
from functional_optim.forms import map_state
from functional_optim.initial import init_leaf
from functional_optim.stage import Stage
from functional_optim.state import LeafState


def keeps_flat_state(stages: Sequence[Stage], hypers: Sequence[Any], dtype: torch.dtype) -> bool:
    """Whether the state of many parameters is one tensor per field, cut as they are."""
    if any(stage.kind != "pointwise" for stage in stages):
        return False
    grain = max(stage.granularity for stage in stages)
    with torch.no_grad():
        probe = init_leaf(stages, hypers, torch.zeros(3 * grain, dtype=dtype, device="cpu"))
    leaf = Leaf(torch.empty(0), torch.empty(0), probe.stages, (), "")
    return all(t.shape in ((3 * grain,), (3,)) for t in tensors_of(leaf)[2:])


class BoundBuffer:
    """The parameters of one flat buffer, as they are stepped.

    Args:
        stages: of the chain; their state must be flat (:func:`keeps_flat_state`).
        hypers: of these parameters, before the first step.
        buffer: where they lie.
        gradient: the flat gradient.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        hypers: Sequence[Any],
        buffer: FlatBuffer,
        gradient: Tensor,
    ) -> None:
        self.segments = buffer.segments
        self._grain = max(stage.granularity for stage in stages)
        # Inference tensors could not be written to outside of that mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            self._steps = torch.zeros(len(buffer.segments), dtype=torch.int64, device="cpu")
            states = init_leaf(stages, hypers, buffer.data).stages
        name = buffer.segments[0].name
        if len(buffer.segments) > 1:
            name += f" and {len(buffer.segments) - 1} more"
        self._whole = Leaf(buffer.data, gradient, states, (), name)
        self._tensors = tensors_of(self._whole)
        self._storages = [tensor.untyped_storage() for tensor in self._tensors]
        self._memory = self._found_memory()
        self._made: list[int] = []
        self._uniform: int | None = 0
        self._seen = -1
        self._mask: tuple[Any, ...] = ()
        self._runs: list[tuple[int, int]] = []
        self._everything = [slice(0, len(self.segments))]
        self._memo: tuple[Any, dict[str, Any]] = (None, {})

    def memo(self, hypers: tuple[Any, ...]) -> dict[str, Any] | None:
        """What kernels found out about the whole lane with these hyper-parameters.

        None while the parameters are at different steps, and so are stepped in several lanes.
        """
        if self._uniform is None:
            return None
        if self._memo[0] is not hypers:
            self._memo = (hypers, {})
        return self._memo[1]

    def states(self, params: Sequence[Tensor]) -> list[LeafState]:
        """Views of the state, one per segment."""
        return [
            LeafState(
                self._steps[k],
                tuple(
                    map_state(lambda flat, one=one, p=param: self._view(flat, one, p), state)
                    for state in self._whole.states
                ),
            )
            for k, (one, param) in enumerate(zip(self.segments, params, strict=True))
        ]

    def _view(self, flat: Tensor, one: Segment, param: Tensor) -> Tensor:
        """A segment of one field."""
        if flat.numel() == self._whole.param.numel():
            view = flat.as_strided(one.shape, one.stride, flat.storage_offset() + one.offset)
            return torch.view_as_complex(view) if param.is_complex() else view
        start = one.offset // self._grain
        return flat[start : start + -(-one.numel // self._grain)]

    def check(self) -> None:
        """Make sure that the state is where it was.

        Raises:
            RuntimeError: a buffer was resized or given other memory.
        """
        if self._found_memory() != self._memory:
            raise RuntimeError(
                f"a flat buffer of {self._whole.name!r} (parameters, gradients or state) was "
                "resized or given other memory since it was bound; bind the parameters again"
            )

    def _found_memory(self) -> tuple[list[int], list[int], list[int]]:
        """Where the tensors are, and how long they and their storages are."""
        return (
            list(map(Tensor.data_ptr, self._tensors)),
            list(map(Tensor.numel, self._tensors)),
            list(map(torch.UntypedStorage.nbytes, self._storages)),
        )

    def lanes(self, mask: tuple[Any, ...] | None) -> list[tuple[Leaf, float, slice]]:
        """What is to be stepped: (lane, number of the step, its segments).

        Args:
            mask: a value per segment, None for those without a gradient; None if all have one.
        """
        if self._steps._version != self._seen:  # noqa: SLF001  changed by someone else
            self._made = self._steps.tolist()
            same = self._made.count(self._made[0]) == len(self._made)
            self._uniform = self._made[0] if same else None
            self._mask = ()
        if mask is None and self._uniform is not None:
            return [(self._whole, self._uniform + 1.0, self._everything[0])]
        if self._uniform is not None:
            self._made = [self._uniform] * len(self.segments)
        full = (0,) * len(self.segments) if mask is None else mask
        if full != self._mask or not self._mask:
            self._mask, self._runs = full, self._cut(full)
        return [
            (self._between(first, last), self._made[first] + 1.0, slice(first, last + 1))
            for first, last in self._runs
        ]

    def _cut(self, mask: tuple[Any, ...]) -> list[tuple[int, int]]:
        """Neighbouring segments that are at the same step and have gradients, first and last."""
        runs: list[tuple[int, int]] = []
        for k, value in enumerate(mask):
            if value is None:
                continue
            if runs and runs[-1][1] == k - 1 and self._made[k - 1] == self._made[k]:
                runs[-1] = (runs[-1][0], k)
            else:
                runs.append((k, k))
        return runs

    def _between(self, first: int, last: int) -> Leaf:
        """The lane from one segment to another, both included."""
        start = self.segments[first].offset
        end = self.segments[last].offset + self.segments[last].numel
        whole, grain = self._whole.param.numel(), self._grain

        def cut(flat: Tensor) -> Tensor:
            if flat.numel() == whole:
                return flat[start:end]
            return flat[start // grain : -(-end // grain)]

        names = self.segments[first].name + (f" to {self.segments[last].name}" * (last > first))
        lane = with_tensors(self._whole, [cut(flat) for flat in tensors_of(self._whole)])
        return lane._replace(name=names)

    def advance(self, parts: list[slice]) -> None:
        """Count a step of these segments."""
        if self._uniform is not None and parts == self._everything:
            self._steps.add_(1)
            self._uniform += 1
        else:
            for part in parts:
                self._steps[part].add_(1)
                self._made[part] = [count + 1 for count in self._made[part]]
            self._uniform = None
        self._seen = self._steps._version  # noqa: SLF001
