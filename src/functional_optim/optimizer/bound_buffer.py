"""BoundBuffer: the state and the step counts of parameters in one flat buffer."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.tensors import version_of
from functional_optim.core.aliasing import clone_aliased
from functional_optim.core.format import append_count
from functional_optim.core.leaf import Leaf, Scalars
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.core.state import LeafState, map_state, state_tensors
from functional_optim.core.state_init import has_same_fields, init_leaf
from functional_optim.kernels.chunks import tensors_of
from functional_optim.plan.flat.layout import FlatBuffer, Segment


def has_flat_state(
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    shapes: Iterable[Sequence[int]],
    dtype: torch.dtype,
) -> bool:
    """Return True if the state can be flat: each field has one element per element or block."""
    if any(stage.kind != "pointwise" for stage in stages):
        return False
    block_size = block_size_of(stages)
    if not has_same_fields(stages, hypers, [*shapes, (3 * block_size,)], dtype):
        return False
    with torch.no_grad():
        probe = init_leaf(stages, hypers, torch.zeros(3 * block_size, dtype=dtype, device="cpu"))
    leaf = Leaf(torch.empty(0), torch.empty(0), probe.stages, (), "")
    return all(t.shape in ((3 * block_size,), (3,)) for t in tensors_of(leaf)[2:])


def _fill(view: Tensor, values: Tensor) -> Tensor:
    # A view of one element may be of an element or of a block: then the shapes differ.
    return view.view(values.shape).copy_(values) if view.numel() == 1 else view.copy_(values)


def tensors_of_state(state: LeafState) -> list[Tensor]:
    """Return the step count, the counts at gates, and the state of all stages, in order."""
    gates = [count for counts in state.gates for count in counts]
    return [state.step, *gates, *state_tensors(state.stages)]


def copy_states(targets: Sequence[LeafState], sources: Sequence[LeafState]) -> None:
    """Copy the values of states into other states, which may share memory with them."""
    to, given = (
        [one for state in states for one in tensors_of_state(state)]
        for states in (targets, sources)
    )
    with torch.no_grad():
        for target, source in zip(to, clone_aliased(given, to), strict=True):
            target.copy_(source)


class BoundBuffer:
    """Parameters of one flat buffer, with their state and step counts.

    Args:
        stages: of the chain; their state must be flat (:func:`has_flat_state`).
        hypers: of these parameters, before the first step.
        counts_on_device: True if the step counts are on the device of the parameters, so that a
            replay of a CUDA graph increases them.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        hypers: Sequence[Any],
        buffer: FlatBuffer,
        gradient: Tensor,
        *,
        counts_on_device: bool = False,
    ) -> None:
        self.buffer = buffer
        self.segments = buffer.segments
        self._block_size = block_size_of(stages)
        self._chain = stages, hypers
        # Inference tensors cannot be written to outside of inference mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            device = buffer.data.device if counts_on_device else torch.device("cpu")
            self.counts = torch.zeros(len(buffer.segments), dtype=torch.int64, device=device)
            """The step count of each segment."""
            states = init_leaf(stages, hypers, buffer.data).stages
        name = append_count(buffer.segments[0].name, len(buffer.segments) - 1)
        self.whole = Leaf(buffer.data, gradient, states, (), name)
        """The whole buffer as one chunk."""
        self._tensors = tensors_of(self.whole)
        self._storages = [tensor.untyped_storage() for tensor in self._tensors]
        self._memory = self._current_memory()
        self._cached_counts: list[int] = []
        self._cached_version = -1
        self._together: set[int] = set()
        """Indices of segments whose count must stay equal to that of the next segment."""

    @property
    def gradient(self) -> Tensor:
        """The flat gradient."""
        return self._tensors[1]

    @property
    def is_full(self) -> bool:
        """True if the parameters fill the buffer, so that it can be stepped whole.

        Otherwise the last block of a parameter would contain the gap after it, and a total would
        contain the gaps.
        """
        return sum(one.numel for one in self.segments) == self.buffer.numel

    @property
    def written(self) -> list[Tensor]:
        """Tensors that a step writes to: the parameters and their state."""
        return [self._tensors[0], *self._tensors[2:]]

    def first_chunk(self, hypers: Any, coefficients: Any, scalars: Scalars) -> Leaf:
        """Return the whole buffer as one chunk, with the coefficients of a first step."""
        made: Any = {"hypers": hypers, "coefficients": coefficients, "scalars": scalars}
        return self.whole._replace(step=1.0, **made)

    def step_counts(self) -> list[int]:
        """Return the step counts, from a cache that does not see replays of captured steps."""
        if version_of(self.counts) != self._cached_version:
            counts = self.counts.tolist()
            self.check_together(counts)
            self._cached_counts, self._cached_version = counts, version_of(self.counts)
        return self._cached_counts

    def states(self, params: Sequence[Tensor]) -> list[LeafState]:
        """Return views of the state, one per segment."""
        return [
            LeafState(self.counts[k], self._stages_of(one, param))
            for k, (one, param) in enumerate(zip(self.segments, params, strict=True))
        ]

    def _stages_of(self, one: Segment, param: Tensor) -> tuple[Any, ...]:
        """Return views of the state of one segment."""
        if not one.numel:  # state per element cannot be told from state per block
            with torch.inference_mode(mode=False), torch.no_grad():
                return init_leaf(*self._chain, param).stages
        views = tuple(
            map_state(lambda flat: self._view(flat, one, param), state)
            for state in self.whole.states
        )
        if one.numel % self._block_size == 0:
            return views
        # The state of the last block was computed with the gap after the parameter.
        with torch.inference_mode(mode=False), torch.no_grad():
            alone = init_leaf(*self._chain, param).stages
            return tuple(map(partial(map_state, _fill), views, alone))

    def _view(self, flat: Tensor, one: Segment, param: Tensor) -> Tensor:
        """Return a view of one field for a segment."""
        if flat.numel() == self.whole.param.numel():
            view = flat.as_strided(one.shape, one.stride, flat.storage_offset() + one.offset)
            return torch.view_as_complex(view) if param.is_complex() else view
        start = one.offset // self._block_size
        return flat[start : start + -(-one.numel // self._block_size)]

    def check(self) -> None:
        """Raise RuntimeError if a buffer was resized, or has other memory."""
        if self._current_memory() != self._memory:
            raise RuntimeError(
                f"a flat buffer of {self.whole.name!r} (parameters, gradients or state) was "
                "resized or given other memory since it was bound; bind the parameters again"
            )

    def _current_memory(self) -> list[int]:
        """Return the addresses of the tensors, and the lengths of tensors and storages."""
        return [
            *map(Tensor.data_ptr, self._tensors),
            *map(Tensor.numel, self._tensors),
            *map(torch.UntypedStorage.nbytes, self._storages),
        ]

    def runs(self, stepped: Sequence[bool]) -> list[slice]:
        """Return slices of adjacent segments that are stepped and have the same step count."""
        counts, runs = self.step_counts(), list[slice]()
        for k, is_stepped in enumerate(stepped):
            if not is_stepped:
                continue
            if runs and runs[-1].stop == k and counts[k - 1] == counts[k]:
                runs[-1] = slice(runs[-1].start, k + 1)
            else:
                runs.append(slice(k, k + 1))
        return runs

    def keep_together(self, stepped: Sequence[bool]) -> None:
        """Require equal counts, from now on, of adjacent stepped segments with equal counts."""
        for run in self.runs(stepped):
            self._together.update(range(run.start, run.stop - 1))

    def check_together(self, counts: Sequence[int]) -> None:
        """Raise RuntimeError if counts that must be equal since a capture differ."""
        for k in self._together:
            if counts[k] != counts[k + 1]:
                one, other = (self.segments[place].name for place in (k, k + 1))
                raise RuntimeError(
                    f"{one!r} and {other!r} were at the same step when a step of both was "
                    f"captured, and are now at {counts[k]} and {counts[k + 1]}: bind the "
                    "parameters again, with this state, and capture a step of those"
                )

    def advance(self, stepped: Sequence[bool]) -> None:
        """Increase the step counts of segments, on the device and in the cache."""
        for run in self.runs(stepped):
            self.counts[run].add_(1)
            self._cached_counts[run] = [count + 1 for count in self._cached_counts[run]]
        self._cached_version = version_of(self.counts)
