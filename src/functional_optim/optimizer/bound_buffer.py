"""BoundBuffer: the state, the step counts and the runs of parameters in one flat buffer.

A *run* is adjacent parameters that are stepped as one chunk. If a chain works in blocks of
elements, a parameter whose last block is not full ends its run. Otherwise the gap after the
parameter would be part of the block, and the result would differ from a step of the parameter
alone.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch import version_of
from functional_optim.core.brief import and_more
from functional_optim.core.initial import init_leaf, same_fields
from functional_optim.core.leaf import Leaf
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.core.state import LeafState, map_state
from functional_optim.kernels.chunks import part, tensors_of, with_tensors
from functional_optim.plan.flat.layout import FlatBuffer, Segment
from functional_optim.plan.guard import NativeGuard


def keeps_flat_state(
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    shapes: Iterable[Sequence[int]],
    dtype: torch.dtype,
) -> bool:
    """Return True if the state can be flat: one tensor per field, cut like the parameter."""
    if any(stage.kind != "pointwise" for stage in stages):
        return False
    block_size = block_size_of(stages)
    if not same_fields(stages, hypers, [*shapes, (3 * block_size,)], dtype):
        return False
    with torch.no_grad():
        probe = init_leaf(stages, hypers, torch.zeros(3 * block_size, dtype=dtype, device="cpu"))
    leaf = Leaf(torch.empty(0), torch.empty(0), probe.stages, (), "")
    return all(t.shape in ((3 * block_size,), (3,)) for t in tensors_of(leaf)[2:])


def _filled(view: Tensor, values: Tensor) -> Tensor:
    """Copy values into a view. With one element, there are as many blocks as elements."""
    return view.view(values.shape).copy_(values) if view.numel() == 1 else view.copy_(values)


def copy_states(targets: Sequence[LeafState], sources: Sequence[LeafState]) -> None:
    """Copy the values of states into other states."""
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.step.copy_(source.step)
            for counts, given in zip(target.gates, source.gates, strict=True):
                for one, other in zip(counts, given, strict=True):
                    one.copy_(other)
            for old, new in zip(target.stages, source.stages, strict=True):
                map_state(lambda a, b: a.copy_(b), old, new)


class BoundBuffer:
    """Parameters of one flat buffer, with their state and step counts.

    Args:
        stages: of the chain; their state must be flat (:func:`keeps_flat_state`).
        hypers: of these parameters, before the first step.
        buffer: of the parameters.
        gradient: the flat gradient.
        counts_beside: True if the step counts are on the device of the parameters, and only
            torch's operations change them, so that a replay counts too.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        hypers: Sequence[Any],
        buffer: FlatBuffer,
        gradient: Tensor,
        *,
        counts_beside: bool = False,
    ) -> None:
        self.buffer = buffer
        self.segments = buffer.segments
        self._block_size = block_size_of(stages)
        self._chain = stages, hypers
        # Inference tensors could not be written to outside of that mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            device = buffer.data.device if counts_beside else torch.device("cpu")
            self._steps = torch.zeros(len(buffer.segments), dtype=torch.int64, device=device)
            states = init_leaf(stages, hypers, buffer.data).stages
        name = and_more(buffer.segments[0].name, len(buffer.segments) - 1)
        self._whole = Leaf(buffer.data, gradient, states, (), name)
        self._tensors = tensors_of(self._whole)
        self._storages = [tensor.untyped_storage() for tensor in self._tensors]
        self._memory = self._found_memory()
        self._native = NativeGuard()
        self._made: list[int] = []
        self._seen = -1
        self._together: set[int] = set()  # places of neighbours that have to be at the same step

    @property
    def written(self) -> list[Tensor]:
        """Tensors that a step writes to: the parameters and their state."""
        return [self._tensors[0], *self._tensors[2:]]

    def count(self, place: int) -> Tensor:
        """Return the step count of the segment at this position."""
        return self._steps[place]

    @property
    def counts(self) -> Tensor:
        """Step counts of all segments."""
        return self._steps

    def made(self) -> list[int]:
        """Return the step counts, from a cache that does not see replays of captured steps.

        Raises:
            RuntimeError: adjacent parameters that were captured in one step have different counts.
        """
        if version_of(self._steps) != self._seen:
            made = self._steps.tolist()
            self.require_together(made)
            self._made, self._seen = made, version_of(self._steps)
        return self._made

    def states(self, params: Sequence[Tensor]) -> list[LeafState]:
        """Return views of the state, one per segment."""
        return [
            LeafState(self._steps[k], self._stages_of(one, param))
            for k, (one, param) in enumerate(zip(self.segments, params, strict=True))
        ]

    def _stages_of(self, one: Segment, param: Tensor) -> tuple[Any, ...]:
        """Return views of the state of one segment."""
        views = tuple(
            map_state(lambda flat: self._view(flat, one, param), state)
            for state in self._whole.states
        )
        if one.numel % self._block_size == 0:
            return views
        # The last block was made with the gap behind it.
        with torch.inference_mode(mode=False), torch.no_grad():
            alone = init_leaf(*self._chain, param).stages
            return tuple(map(partial(map_state, _filled), views, alone))

    def _view(self, flat: Tensor, one: Segment, param: Tensor) -> Tensor:
        """Return a view of one field for a segment."""
        if flat.numel() == self._whole.param.numel():
            view = flat.as_strided(one.shape, one.stride, flat.storage_offset() + one.offset)
            return torch.view_as_complex(view) if param.is_complex() else view
        start = one.offset // self._block_size
        return flat[start : start + -(-one.numel // self._block_size)]

    def check(self) -> None:
        """Make sure that the state has not moved.

        Raises:
            RuntimeError: a buffer was resized or given other memory.
        """
        if self._native.hold(self._tensors, where=True):
            return
        if self._found_memory() != self._memory:
            raise RuntimeError(
                f"a flat buffer of {self._whole.name!r} (parameters, gradients or state) was "
                "resized or given other memory since it was bound; bind the parameters again"
            )
        self._native.learn(self._tensors)

    def _found_memory(self) -> list[int]:
        """Return the addresses of the tensors, and the lengths of tensors and storages."""
        return [
            *map(Tensor.data_ptr, self._tensors),
            *map(Tensor.numel, self._tensors),
            *map(torch.UntypedStorage.nbytes, self._storages),
        ]

    @property
    def whole(self) -> Leaf:
        """The whole buffer as one chunk."""
        return self._whole

    def row(self, k: int) -> list[int]:
        """Return the addresses of a segment's tensors, the parameter first."""
        offset, count = self.segments[k].offset, self._whole.param.numel()
        return [
            one.data_ptr()
            + one.element_size() * (offset if one.numel() == count else offset // self._block_size)
            for one in self._tensors
        ]

    def runs(self, present: bytes | None = None) -> list[slice]:
        """Return the runs: slices of segments that are stepped together.

        The segments of a run are adjacent and have the same step count. All but the last consist
        of full blocks.

        Args:
            present: for each parameter of the layout, whether it is stepped; None for all.
        """
        made = self.made()
        runs: list[slice] = []
        for k, one in enumerate(self.segments):
            if present is not None and not present[one.index]:
                continue
            joins = runs and runs[-1].stop == k and made[k - 1] == made[k]
            if joins and self.segments[k - 1].numel % self._block_size == 0:
                runs[-1] = slice(runs[-1].start, k + 1)
            else:
                runs.append(slice(k, k + 1))
        return runs

    def chunk(self, run: slice) -> Leaf:
        """Return a run as one chunk, without coefficients."""
        first, last = self.segments[run.start], self.segments[run.stop - 1]
        start, end = first.offset, last.offset + last.numel
        if (start, end) == (0, self._whole.param.numel()):
            return self._whole
        names = first.name + (f" to {last.name}" * (last is not first))
        chunk = with_tensors(self._whole, part(self._tensors, self._block_size, start, end))
        return chunk._replace(name=names)

    def keep_together(self, stepped: Sequence[bool]) -> None:
        """Require from now on that adjacent stepped parameters with equal counts stay equal.

        Args:
            stepped: for each parameter of the layout, whether it was stepped.
        """
        made = self.made()
        for k, (one, other) in enumerate(pairwise(self.segments)):
            if stepped[one.index] and stepped[other.index] and made[k] == made[k + 1]:
                self._together.add(k)

    def require_together(self, counts: Sequence[int]) -> None:
        """Make sure that step counts fit the captured step.

        Raises:
            RuntimeError: two adjacent parameters had the same count, and now differ.
        """
        for k in self._together:
            if counts[k] != counts[k + 1]:
                one, other = (self.segments[place].name for place in (k, k + 1))
                raise RuntimeError(
                    f"{one!r} and {other!r} were at the same step when a step of both was "
                    f"captured, and are now at {counts[k]} and {counts[k + 1]}: bind the "
                    "parameters again, with this state, and capture a step of those"
                )

    def advance(self, runs: Sequence[slice]) -> None:
        """Increase the step counts of these runs, without reading the counts."""
        self.made()
        for one in runs:
            self._steps[one].add_(1)
            self._made[one] = [count + 1 for count in self._made[one]]
        self._seen = version_of(self._steps)
