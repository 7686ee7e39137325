"""One flat buffer of a bound optimizer: its state, its step counts, and the lanes to be stepped.

Where a chain works in blocks of elements, what lies between a parameter whose last block is not
full and the next must have no part in the block, as it has none where the parameter is stepped
alone. Such a parameter ends its lane; or, if the chain is fillable and the gradients lie in the
flat buffer, the block is filled up while the step is made.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.block_ends import BlockEnds
from functional_optim.executors.lanes import part, tensors_of, with_tensors
from functional_optim.executors.leaf import Leaf
from functional_optim.flat_layout import FlatBuffer, Segment
from functional_optim.forms import map_state
from functional_optim.initial import init_leaf, same_fields
from functional_optim.native import LOOPS
from functional_optim.places import Remembered, mark_changed
from functional_optim.stage import Stage, grain_of, in_full_blocks, is_fillable
from functional_optim.state import LeafState


def keeps_flat_state(
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    shapes: Iterable[Sequence[int]],
    dtype: torch.dtype,
) -> bool:
    """Whether the state of parameters of these shapes is one tensor per field, cut as they are."""
    if any(stage.kind != "pointwise" for stage in stages):
        return False
    grain = grain_of(stages)
    if not same_fields(stages, hypers, [*shapes, (3 * grain,)], dtype):
        return False
    with torch.no_grad():
        probe = init_leaf(stages, hypers, torch.zeros(3 * grain, dtype=dtype, device="cpu"))
    leaf = Leaf(torch.empty(0), torch.empty(0), probe.stages, (), "")
    return all(t.shape in ((3 * grain,), (3,)) for t in tensors_of(leaf)[2:])


def _filled(view: Tensor, values: Tensor) -> Tensor:
    """The view with these values; of a single element, blocks and elements are equally many."""
    return view.view(values.shape).copy_(values) if view.numel() == 1 else view.copy_(values)


def copy_states(targets: Sequence[LeafState], sources: Sequence[LeafState]) -> None:
    """Write the values of states into others."""
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.step.copy_(source.step)
            for old, new in zip(target.stages, source.stages, strict=True):
                map_state(lambda a, b: a.copy_(b), old, new)


class _Cut(NamedTuple):
    """The lanes for some mask."""

    mask: tuple[Any, ...]
    members: list[int]
    """The segments in its lanes, which hold as long as all of these are stepped, or none."""
    lanes: list[tuple[Leaf, slice]]


class BoundBuffer:
    """The parameters of one flat buffer, as they are stepped.

    Args:
        stages: of the chain; their state must be flat (:func:`keeps_flat_state`).
        hypers: of these parameters, before the first step.
        buffer: where they lie.
        gradient: the flat gradient.
        counts_beside: whether the step counts are on the device of the parameters, and counted
            there by torch's operations alone, so that a replay counts too.
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
        self._grain = grain_of(stages)
        self._chain = stages, hypers
        # Inference tensors could not be written to outside of that mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            device = buffer.data.device if counts_beside else torch.device("cpu")
            self._steps = torch.zeros(len(buffer.segments), dtype=torch.int64, device=device)
            states = init_leaf(stages, hypers, buffer.data).stages
        name = buffer.segments[0].name
        if len(buffer.segments) > 1:
            name += f" and {len(buffer.segments) - 1} more"
        self._whole = Leaf(buffer.data, gradient, states, (), name)
        self._tensors = tensors_of(self._whole)
        short = any(one.numel % self._grain for one in self.segments)
        self.ends = self._found_ends() if short and is_fillable(stages) else None
        """What fills up the blocks that segments end in; None where that is not to be done."""
        self._joins_all = self.ends is not None or not short
        self._storages = [tensor.untyped_storage() for tensor in self._tensors]
        self._memory = self._found_memory()
        self._remembered = Remembered()
        self._made: list[int] = []
        self._uniform: int | None = 0
        self._seen = -1
        self.counts_beside = counts_beside
        self._together: set[int] = set()  # places of neighbours that have to be at the same step
        # Found last time, with blocks filled up and without.
        self._cuts: dict[bool, _Cut] = {}
        self._whole_cuts: dict[bool, list[tuple[Leaf, slice]]] = {}
        self._memos: tuple[Any, dict[Any, dict[Any, Any]]] = (None, {})

    @property
    def gradient(self) -> Tensor:
        """The flat gradient."""
        return self._whole.grad

    @property
    def written(self) -> list[Tensor]:
        """What a step writes to: the parameters and their state."""
        return [self._tensors[0], *self._tensors[2:]]

    def memo(
        self, hypers: tuple[Any, ...], part: slice | None = None, length: int | None = None
    ) -> dict[Any, Any] | None:
        """What kernels found out about a lane with these hyper-parameters.

        Args:
            hypers: of the lane; others begin anew.
            part: its segments; None for all.
            length: its elements; None for all.

        Returns:
            Where that stands; None while not all segments are at the same step, so that lanes come
            and go.
        """
        if self._uniform is None or not self._joins_all:
            return None
        if self._memos[0] is not hypers or len(self._memos[1]) > 2 * len(self.segments):
            self._memos = (hypers, {})
        first = 0 if part is None else part.start
        key = first, self._whole.param.numel() if length is None else length
        return self._memos[1].setdefault(key, {})

    def _found_ends(self) -> BlockEnds:
        count = self.buffer.data.numel()
        param, grad, *state = self._tensors
        each = [tensor for tensor in state if tensor.numel() == count]
        return BlockEnds(self.segments, self._grain, (param, grad), each)

    def count(self, place: int) -> Tensor:
        """How many steps the segment at this place has made."""
        return self._steps[place]

    def unstepped(self) -> list[int]:
        """Which of the layout's parameters, by their ``index``, have made no step."""
        self._look_at_steps()
        if self._uniform is not None:
            return [] if self._uniform else [one.index for one in self.segments]
        return [one.index for one, made in zip(self.segments, self._made, strict=True) if not made]

    def states(self, params: Sequence[Tensor]) -> list[LeafState]:
        """Views of the state, one per segment."""
        return [
            LeafState(self._steps[k], self._stages_of(one, param))
            for k, (one, param) in enumerate(zip(self.segments, params, strict=True))
        ]

    def _stages_of(self, one: Segment, param: Tensor) -> tuple[Any, ...]:
        """Views of the state of one segment."""
        views = tuple(
            map_state(lambda flat: self._view(flat, one, param), state)
            for state in self._whole.states
        )
        if one.numel % self._grain == 0:
            return views
        # The last block was made with the gap behind it.
        with torch.inference_mode(mode=False), torch.no_grad():
            alone = init_leaf(*self._chain, param).stages
            return tuple(map(partial(map_state, _filled), views, alone))

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
        if self._remembered.hold(self._tensors, where=True):
            return
        if self._found_memory() != self._memory:
            raise RuntimeError(
                f"a flat buffer of {self._whole.name!r} (parameters, gradients or state) was "
                "resized or given other memory since it was bound; bind the parameters again"
            )
        self._remembered.learn(self._tensors)

    def _found_memory(self) -> list[int]:
        """Where the tensors are, and how long they and their storages are."""
        return [
            *map(Tensor.data_ptr, self._tensors),
            *map(Tensor.numel, self._tensors),
            *map(torch.UntypedStorage.nbytes, self._storages),
        ]

    @property
    def whole(self) -> Leaf:
        """All of it as one lane."""
        return self._whole

    def next_step(self) -> float | None:
        """The number of the next step; None where it is made in several lanes."""
        self._look_at_steps()
        if self._uniform is None or not self._joins_all:
            return None
        return self._uniform + 1.0

    def groups(self, members: Sequence[int]) -> list[tuple[float, list[int]]]:
        """Segments that are at the same step: (number of the next step, their places).

        Args:
            members: the places of the segments that are to be stepped.
        """
        self._look_at_steps()
        if self._uniform is not None:
            return [(self._uniform + 1.0, list(members))] if members else []
        found: dict[int, list[int]] = {}
        for k in members:
            found.setdefault(self._made[k], []).append(k)
        return [(step + 1.0, own) for step, own in found.items()]

    def lanes(
        self,
        mask: tuple[Any, ...] | None,
        *,
        filled: bool = True,
    ) -> list[tuple[Leaf, float, slice]]:
        """What is to be stepped: (lane, number of the step, its segments).

        Args:
            mask: a value per segment, None for those without a gradient; neighbours of different
                values are not stepped together. None if all are alike, with the value 0.
            filled: whether last blocks are filled up (see :attr:`ends`).
        """
        self._look_at_steps()
        filled = filled and self.ends is not None
        if mask is None and self._uniform is not None:
            if filled not in self._whole_cuts:
                alike = (0,) * len(self.segments)
                self._whole_cuts[filled] = self._lanes_of(alike, filled=filled)
            return [(lane, self._uniform + 1.0, part) for lane, part in self._whole_cuts[filled]]
        if self._uniform is not None:
            self._made = [self._uniform] * len(self.segments)
        full = (0,) * len(self.segments) if mask is None else mask
        cut = self._cuts.get(filled)
        if cut is None or cut.mask != full:
            lanes = self._lanes_of(full, filled=filled)
            members = [k for k, value in enumerate(full) if value is not None]
            cut = self._cuts[filled] = _Cut(full, members, lanes)
        return [(lane, self._made[part.start] + 1.0, part) for lane, part in cut.lanes]

    def _look_at_steps(self) -> None:
        """Read the numbers of steps, if someone has written to them."""
        if self._steps._version != self._seen:  # noqa: SLF001  torch has no public name
            made = self._steps.tolist()
            self.require_together(made)
            self._made = made
            same = self._made.count(self._made[0]) == len(self._made)
            self._uniform = self._made[0] if same else None
            self._cuts = {}

    def keep_together(self, stepped: Sequence[bool]) -> None:
        """From now on, neighbours that were stepped, and are at the same step, have to stay so.

        Args:
            stepped: of each parameter, by its place.
        """
        if self._uniform is not None:
            self._made = [self._uniform] * len(self.segments)
        for k, (one, other) in enumerate(pairwise(self.segments)):
            if stepped[one.index] and stepped[other.index] and self._made[k] == self._made[k + 1]:
                self._together.add(k)

    def require_together(self, counts: Sequence[int]) -> None:
        """Make sure that step counts fit what was captured.

        Raises:
            RuntimeError: of two neighbours that were at the same step, one is no longer.
        """
        for k in self._together:
            if counts[k] != counts[k + 1]:
                one, other = (self.segments[place].name for place in (k, k + 1))
                raise RuntimeError(
                    f"{one!r} and {other!r} were at the same step when a step of both was "
                    f"captured, and are now at {counts[k]} and {counts[k + 1]}: bind the "
                    "parameters again, with this state, and capture a step of those"
                )

    def _lanes_of(self, mask: Sequence[Any], *, filled: bool) -> list[tuple[Leaf, slice]]:
        """A lane for each run of segments, and the segments."""
        return [
            (self._between(first, last, filled=filled), slice(first, last + 1))
            for first, last in self._runs(mask, filled=filled)
        ]

    def _runs(self, mask: Sequence[Any], *, filled: bool) -> list[tuple[int, int]]:
        """Neighbouring segments that are stepped together, first and last.

        They are at the same step, have gradients of one mark, and each but the last is made of full
        blocks, if its last is not filled up.
        """
        runs: list[tuple[int, int]] = []
        for k, value in enumerate(mask):
            if value is None:
                continue
            after = runs and runs[-1][1] == k - 1 and mask[k - 1] == value
            if after and self._joins(k, filled=filled):
                runs[-1] = (runs[-1][0], k)
            else:
                runs.append((k, k))
        return runs

    def _joins(self, k: int, *, filled: bool) -> bool:
        """Whether a segment may be stepped together with the one before it."""
        same = self._uniform is not None or self._made[k - 1] == self._made[k]
        return same and (filled or self.segments[k - 1].numel % self._grain == 0)

    def _between(self, first: int, last: int, *, filled: bool) -> Leaf:
        """The lane from one segment to another, both included; with what fills it up, if it is."""
        start = self.segments[first].offset
        end = self.segments[last].offset + self.segments[last].numel
        if filled:
            end = in_full_blocks(end, self._grain)
        if (start, end) == (0, self._whole.param.numel()):
            return self._whole
        names = self.segments[first].name + (f" to {self.segments[last].name}" * (last > first))
        lane = with_tensors(self._whole, part(tensors_of(self._whole), self._grain, start, end))
        return lane._replace(name=names)

    def _mark_state(self) -> None:
        """Tell autograd that the state was written to: not every kernel does."""
        if len(self._tensors) > 2:
            mark_changed(self._tensors[2:])

    def advance(self, parts: list[slice]) -> None:
        """Count a step of these segments."""
        stepped = sum(one.stop - one.start for one in parts)
        if self._uniform is not None and stepped == len(self.segments):
            self.advance_all()
            return
        self._mark_state()
        if self._uniform is not None:
            self._made = [self._uniform] * len(self.segments)
        # Of others, some are no longer at the same step.
        members = sorted(k for one in parts for k in range(one.start, one.stop))
        self._cuts = {key: cut for key, cut in self._cuts.items() if cut.members == members}
        for one in parts:
            self._steps[one].add_(1)
            self._made[one] = [count + 1 for count in self._made[one]]
        self._uniform = None
        self._seen = self._steps._version  # noqa: SLF001  torch has no public name

    def advance_all(self) -> None:
        """Count a step of all segments, which are at the same step."""
        assert self._uniform is not None
        self._mark_state()
        loops = None if self.counts_beside else LOOPS.get(1)
        if loops is None or not loops.advance(self._steps):
            self._steps.add_(1)
        self._uniform += 1
        self._seen = self._steps._version  # noqa: SLF001  torch has no public name
