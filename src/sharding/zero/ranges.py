"""Stepping by ranges: what communication hooks use of ZeroRedundancyOptimizer."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functional_optim.frontends.averaged_params import AveragedParams, Views
from sharding.ownership import OwnedRange
from sharding.shard_plan import ShardPlan
from sharding.transport import Transport
from sharding.zero.coalescing import Coalescing
from sharding.zero.composed import ComposedShards
from sharding.zero.gather import GatherWork, messages_of
from sharding.zero.groups import (
    Transports,
    in_order,
    reduced,
    vectors_of,
)
from sharding.zero.local_shards import Gradients, LocalShards
from sharding.zero.parameter_memory import ParameterMemory
from sharding.zero.shard_steps import ShardSteps
from sharding.zero.state_dict import Collected
from sharding.zero.viewed import viewed_params

_REQUIRES_GRAD = attrgetter("requires_grad")  # no frame for each parameter

MOST_GATHERS = 16
"""For how many sets of parameters the messages of their gather are kept."""


class SteppedByRanges(AveragedParams):
    """The part of :class:`~sharding.ZeroRedundancyOptimizer` that works on ranges of elements."""

    plan: ShardPlan
    params: dict[str, Tensor]
    optim: torch.optim.Optimizer
    process_group: dist.ProcessGroup
    rank: int
    _memory: ParameterMemory
    _local: ShardSteps | None
    _messages: dict[tuple[tuple[str, ...], int], Coalescing]
    _transports: Transports
    _opt_called: bool
    _collected: Collected | None

    hook_unscales: bool = False
    """Whether the communication hook divides gradients by the scale of a GradScaler."""

    @property
    def owned(self) -> tuple[OwnedRange, ...]:
        """Return the ranges that this rank owns now; whole parameters where none is cut."""
        return self.plan.owned(self.rank)

    @property
    def join_device(self) -> torch.device:
        """The device that ranks talk over."""
        return next(iter(self.params.values())).device

    @property
    def measured_stages(self) -> int:
        """Number of totals over all gradients that :meth:`step_owned` needs in turn."""
        return self._steps.measured_stages

    @property
    def steps_at_once(self) -> bool:
        """Return True if one call of :meth:`step_owned` is a step of all parameters.

        So it is where numbers are kept that belong to all: parameters that a call does not have
        have no gradient in that step.
        """
        return self._composed is not None

    def begin_iteration(self) -> None:
        """Begin the account of an iteration, in which every owned range is stepped exactly once.

        Raises:
            RuntimeError: the last one did not end; names what was never stepped.
        """
        self._steps.account.begin(self._own.every())

    def end_iteration(self) -> None:
        """End it.

        Raises:
            RuntimeError: names what this rank owns, is trainable, and was neither stepped nor
                declared unused.
        """
        self._steps.account.end(self._own.every())
        self._opt_called = True  # schedulers of torch warn where they see no step

    def skip(self, paths: Iterable[str]) -> None:
        """Declare that no gradient comes for these parameters in this iteration.

        Raises:
            ValueError: a path that there is not.
        """
        declared = list(paths)
        for path in declared:
            self.plan.index_of(path)
        self._steps.account.skip(declared)

    def step_owned(self, gradients: Gradients, *, measured: Sequence[Tensor] = ()) -> None:
        """Step these ranges only, in place, with the options that ``param_groups`` has now.

        The parameters are not made whole on the other ranks: see :meth:`gather_ranges`. Where
        :attr:`steps_at_once`, every rank calls this for each step, also one that owns nothing.

        Args:
            gradients: by path, ranges [start, stop) of the parameter laid flat in the order of its
                shape, each as it stands in :attr:`owned`, and their gradients in one dimension (or
                that of all of the parameter, in its shape).
            measured: for chains with measured stages, their totals: see :meth:`measure`.

        Raises:
            RuntimeError: a range that was stepped already in this iteration, or declared unused.
            ValueError: a range that is not this rank's, a gradient or an option that does not fit.
                Nothing is changed then.

        Example::

            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> from sharding import ZeroRedundancyOptimizer
            >>> w = torch.nn.Parameter(torch.ones(4))
            >>> zero = ZeroRedundancyOptimizer([("w", w)], torch.optim.SGD, lr=0.5)
            >>> zero.step_owned({"w": [(0, 4, torch.ones(4))]})
            >>> w.tolist()
            [0.5, 0.5, 0.5, 0.5]
            >>> dist.destroy_process_group()
        """
        asked = self._own.requests(gradients)
        self._collected = None
        self._find_memory(self.params if self.steps_at_once else gradients)
        self._steps.step_some(asked, measured)
        self._memory.mark_changed(gradients)

    def measure(self, gradients: Gradients, *, measured: Sequence[Tensor] = ()) -> Tensor:
        """Return the addends of these ranges to the next total, such as squared norms.

        Args:
            gradients: as for :meth:`step_owned`.
            measured: the totals of the measured stages before.

        Returns:
            A float64 tensor with an entry for each parameter of the plan, on the CPU; where the
            stage needs several totals, a row of it for each. Add those of several calls, and hand
            the sum to :meth:`total`.

        Raises:
            ValueError: the chain needs no further total; otherwise as for :meth:`step_owned`.
        """
        asked = self._own.requests(gradients)
        self._find_memory(self.params if self.steps_at_once else gradients)
        addends, numbers = self._steps.addends_of(asked, measured)
        return vectors_of(addends, self.plan, numbers)

    def total(self, addends: Tensor) -> Tensor:
        """The sum over all parameters, in their order, and ranks: what ``measured`` takes.

        Collective. Where the plan cuts no parameter it is, bit for bit, what one process adds up.

        Args:
            addends: what :meth:`measure` returned.
        """
        return self.summed(reduced(addends, self.plan, self.process_group, self.join_device))

    def summed(self, vector: Tensor) -> Tensor:
        """The sum of one number for each parameter, in the order in which one process sums.

        Args:
            vector: of all ranks, in float64, on the CPU; or rows of such.
        """
        if vector.dim() > 1:
            return torch.stack(list(map(self.summed, vector.unbind())))
        return in_order(vector)

    def gather_ranges(self, paths: Iterable[str] | None = None) -> GatherWork:
        """Launch the gather of these parameters (by default all that are trained). Collective.

        Args:
            paths: the same on all ranks.

        Returns:
            Something to ``wait()`` for; until then, the parameters must be left alone.
        """
        chosen = tuple(self._active() if paths is None else paths)
        size = self.plan.shard_ranks  # the group is that of one replica
        if (chosen, size) not in self._messages and len(self._messages) >= MOST_GATHERS:
            self._messages.clear()  # other parameters are trained at every step
        messages = self._messages_of(chosen, size)
        return GatherWork(self._memory, messages, chosen, self._transports)

    def gather_over(self, transport: Transport, paths: tuple[str, ...]) -> GatherWork:
        """Gather over a transport of the caller, all at once, the same paths at every step.

        Autograd is not told of it: the caller knows when nothing reads the parameters any more.

        Args:
            transport: over the process group, or one of the same ranks.
            paths: of parameters that are on one device.
        """
        messages = self._messages_of(paths, transport.size)
        transports = {self.params[paths[0]].device: transport}
        return GatherWork(self._memory, messages, (), transports, in_flight=None)

    def _messages_of(self, paths: tuple[str, ...], size: int) -> Coalescing:
        """Return the messages that move parameters from where they are now."""
        self._find_memory(paths)
        found = self._messages.get((paths, size))
        if found is None:
            found = messages_of(self._memory, self.plan, paths, size)
            self._messages[paths, size] = found
        return found

    def view(self) -> Views:
        """Return the parameters to evaluate with: see :meth:`Optimizer.view`. Collective.

        Parameters are left as they are; until it returns, nobody must read them. :meth:`averaged`
        puts the result into a model; it is collective too, at the start of the ``with`` statement.

        Returns:
            A tensor for each parameter, whole, in memory of its own; the same on all ranks. By
            name, in a dict, where the optimizer was given names; else in a list, in the order of
            ``param_groups``.

        Raises:
            RuntimeError: a class of which nothing is known; or the parameters are averages now,
                inside of :meth:`averaged`.
            TransportError: a rank died, or did not come; parameters are what they were.

        Example::

            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> from functional_optim import chain, ema, sgd
            >>> from sharding import ZeroRedundancyOptimizer
            >>> weight = torch.nn.Parameter(torch.ones(1))
            >>> zero = ZeroRedundancyOptimizer([("weight", weight)], chain(sgd(lr=1.0), ema(0.5)))
            >>> weight.grad = torch.ones(1)
            >>> zero.step()
            >>> weight.tolist(), zero.view()["weight"].tolist()
            ([0.0], [0.5])
            >>> dist.destroy_process_group()
        """
        return super().view()

    def _viewed(self) -> list[Tensor]:
        params = [param for group in self.param_groups for param in group["params"]]
        self._find_memory(self.params)
        return viewed_params(
            self._own, self.param_groups, params, lambda: self.gather_ranges(self.params).wait()
        )

    @property
    def shared(self) -> dict[str, Any]:
        """The numbers that belong to no parameter: see :meth:`Optimizer.shared`."""
        composed = self._composed
        return {} if composed is None else composed.shared

    @property
    def _composed(self) -> ComposedShards | None:
        return None if self._local is None else self._local.composed

    def _show_numbers(self) -> None:
        """Write what belongs to no parameter into all groups, where a checkpoint has it."""
        if self._composed is not None:
            self._composed.show_numbers(self.param_groups)

    def gather(self) -> None:
        """Make all parameters that are trained whole again, on every rank. Collective.

        Raises:
            TransportError: a rank died, or did not come within the group's timeout; it is named.
        """
        self.gather_ranges().wait()

    def _total(self, addends: Mapping[str, Tensor], numbers: int) -> Tensor:
        """Return the total of addends by path: numbers if ``width`` is 0, else rows."""
        return self.total(vectors_of(addends, self.plan, numbers))

    @property
    def _steps(self) -> ShardSteps:
        if self._local is None:
            raise RuntimeError(
                f"{type(self.optim).__name__} has no functional equivalent, so it cannot be "
                "stepped by ranges"
            )
        return self._local

    @property
    def _own(self) -> LocalShards:
        return self._steps.owned

    def _active(self) -> Iterable[str]:
        """The parameters that may change."""
        own: Collection[str] = self.params
        if not all(map(_REQUIRES_GRAD, self.params.values())):
            every = self.params.items()
            own = {path for path, one in every if one.requires_grad or one.grad is not None}
        if self._composed is not None:
            own = self._composed.may_change(own)
        return own if own is self.params else (path for path in self.params if path in own)

    def _find_memory(self, paths: Collection[str]) -> None:
        if self._memory.refresh(paths):
            self._messages.clear()
            if self._local is not None:
                self._local.moved()
