"""Steps and gathers of ranges, which communication hooks use with ZeroRedundancyOptimizer."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functional_optim.engine.gradients import Scaling
from functional_optim.engine.options import FixedGroups
from functional_optim.engine.states import AveragedParams, Views
from sharding.ownership import OwnedRange
from sharding.shard_plan import ShardPlan
from sharding.transport import Transport, Work
from sharding.zero.coalescing import ElementMessage
from sharding.zero.gather import gather_views, plan_gather, start_gather
from sharding.zero.groups import Transports, sum_over_ranks, sum_vector, vector_of
from sharding.zero.local_shards import Gradients, LocalShards
from sharding.zero.parameter_memory import ParameterMemory
from sharding.zero.shard_optimizer import ShardOptimizer

logger = logging.getLogger(__name__)

_REQUIRES_GRAD = attrgetter("requires_grad")  # without a Python call for each parameter

MOST_GATHERS = 16
"""Number of sets of parameters whose gather messages are kept."""


class RangeStepMixin(AveragedParams):
    """Part of :class:`~sharding.ZeroRedundancyOptimizer` that steps and gathers ranges."""

    plan: ShardPlan
    params: dict[str, Tensor]
    optim: torch.optim.Optimizer
    process_group: dist.ProcessGroup
    rank: int
    _memory: ParameterMemory
    _fixed_groups: FixedGroups
    _local: ShardOptimizer | None
    _messages: dict[tuple[tuple[str, ...], int], tuple[ElementMessage, ...]]
    _transports: Transports
    """Over the ranks of one replica."""
    _sum_transports: Transports
    """Over all ranks."""
    _opt_called: bool
    _collected: tuple[int, dict[int, dict[Any, Any]] | None] | None
    """The rank that has the state of all ranks, and the state on that rank; None after a step."""

    has_hook: bool = False
    """True once a communication hook was called, or a hook of the caller has stepped ranges."""
    hook_unscales: bool = False
    """True if the communication hook divides gradients by the scale of a GradScaler."""

    @property
    def owned(self) -> tuple[OwnedRange, ...]:
        """The ranges that this rank owns; whole parameters, if no parameter is cut."""
        return self.plan.owned(self.rank)

    @property
    def join_device(self) -> torch.device:
        """The device on which ranks communicate."""
        return next(iter(self.params.values())).device

    @property
    def measured_stages(self) -> int:
        """Number of totals over all gradients that :meth:`step_owned` needs."""
        return self._steps.measured_stages

    @property
    def steps_at_once(self) -> bool:
        """True if one call of :meth:`step_owned` is a step of all parameters.

        This holds for optimizers with shared scalars. Parameters that are not in the call have no
        gradient in that step.
        """
        return self._local is not None and self._local.steps_at_once

    def _fix_groups(self) -> None:
        """Note the parameters of each group, with which later groups are compared."""
        self._fixed_groups = FixedGroups(
            self.params,
            self.param_groups,
            fixed="the plan of this ZeroRedundancyOptimizer",
            ways="Call add_param_group to add parameters, or set requires_grad_(False) to stop "
            "training one; else make another optimizer",
        )

    def check_groups(self) -> None:
        """Raise ValueError if a parameter was added to a group, or removed from one, by hand."""
        self._fixed_groups.check(self.param_groups)

    def mark_stepped(self) -> None:
        """Note a step of all ranks: delete collected state, and let schedulers see the step."""
        self._collected = None  # also on a rank that owned nothing
        self._opt_called = self.has_hook = True  # else torch's schedulers warn of no step

    def step_owned(self, gradients: Gradients, *, measured: Sequence[Tensor] = ()) -> None:
        """Step some ranges in place, with the current options of ``param_groups``.

        Other ranks do not get the new values: see :meth:`gather_ranges`. If :attr:`steps_at_once`,
        every rank must call this for each step, even if it owns nothing.

        Args:
            gradients: by path, ranges [start, stop) of the flattened parameter, as in
                :attr:`owned`, and their flat gradients (or the gradient of the whole parameter, in
                its shape).
            measured: the totals that the chain needs: see :meth:`measure`.

        Raises:
            ValueError: a range that this rank does not own; a gradient or an option that does not
                fit. Nothing has changed.

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
        shards, given = self._own.match_ranges(gradients)
        self._collected, self.has_hook = None, True
        self._find_memory(self.params if self.steps_at_once else gradients)
        self._steps.step_shards(given, measured, shards)
        self._memory.mark_changed(gradients)

    def measure(self, gradients: Gradients, *, measured: Sequence[Tensor] = ()) -> Tensor:
        """Return the addends of these ranges to the next total, such as squared norms.

        Args:
            gradients: as for :meth:`step_owned`.
            measured: the totals before this one.

        Returns:
            A float64 tensor on the CPU, with an entry for each parameter of the plan; with a row
            for each total, if the stage needs several. Add the results of several calls, and pass
            the sum to :meth:`total`.

        Raises:
            ValueError: the chain needs no further total; else as for :meth:`step_owned`.
        """
        shards, given = self._own.match_ranges(gradients)
        self._find_memory(self.params if self.steps_at_once else gradients)
        addends, numbers = self._steps.measure_shards(given, measured, shards)
        return vector_of(addends, self.plan, numbers)

    def total(self, addends: Tensor) -> Tensor:
        """Return the sum over all parameters and ranks, for the argument ``measured``. Collective.

        If the plan cuts no parameter, the result equals that of one process bit for bit.

        Args:
            addends: the result of :meth:`measure`.

        Raises:
            TransportError: a rank died, or did not come; names it.
        """
        return sum_vector(self.sum_over_ranks([addends], addends.shape))

    def sum_over_ranks(
        self, vectors: Iterable[Tensor], shape: Sequence[int], transport: Transport | None = None
    ) -> Tensor:
        """Return the sum of vectors over all ranks, on the CPU. Collective.

        Args:
            vectors: of this rank, to be added; in float64.
            shape: of a vector, the same on all ranks.
            transport: over all ranks; by default that of this optimizer.

        Raises:
            TransportError: a rank died, or did not come; names it.
        """
        device = self.join_device
        transport = self._sum_transports[device] if transport is None else transport
        return sum_over_ranks(vectors, shape, self.plan, transport, device)

    def gather_ranges(self, paths: Iterable[str] | None = None) -> Work:
        """Start to gather parameters, by default all trained parameters. Collective.

        Args:
            paths: of the parameters, the same on all ranks.

        Returns:
            The work, with ``wait()``. Nothing may use the parameters before it is done.
        """
        chosen = tuple(self._changing_paths() if paths is None else paths)
        size = self.plan.shard_ranks  # the transports connect the ranks of one replica
        if (chosen, size) not in self._messages and len(self._messages) >= MOST_GATHERS:
            self._messages.clear()  # each step trains other parameters
        messages = self._messages_of(chosen, size)
        return start_gather(self._memory, messages, chosen, self._transports)

    def gather_over(self, transport: Transport, paths: tuple[str, ...]) -> Work:
        """Gather parameters over a transport of the caller; the same paths at every step.

        Autograd is not told about the writes: the caller knows when nothing reads the parameters.

        Args:
            transport: over the process group, or another group of the same ranks.
            paths: of parameters on one device.
        """
        messages = self._messages_of(paths, transport.size)
        transports = {self.params[paths[0]].device: transport}
        return start_gather(self._memory, messages, (), transports, in_flight=None)

    def _messages_of(self, paths: tuple[str, ...], size: int) -> tuple[ElementMessage, ...]:
        """Return the messages that gather parameters, for their current memory."""
        self._find_memory(paths)
        found = self._messages.get((paths, size))
        if found is None:
            found = plan_gather(self._memory, self.plan, paths, size)
            self._messages[paths, size] = found
        return found

    def view(self) -> Views:
        """Return the parameters to evaluate with: see :meth:`Optimizer.view`. Collective.

        The parameters do not change, but nothing may read them during the call. :meth:`averaged`
        writes the result into a model; it is collective, too, at the start of the ``with`` block.

        Returns:
            A new tensor for each whole parameter, the same on all ranks: a dict by name if the
            optimizer has names, else a list in the order of ``param_groups``.

        Raises:
            RuntimeError: a class without functional equivalent; or :meth:`averaged` is active.
            TransportError: a rank died, or did not come. Nothing has changed.

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
        return gather_views(
            self._own, self.param_groups, params, lambda: self.gather_ranges(self.params).wait()
        )

    @property
    def shared(self) -> dict[str, Any]:
        """The shared scalars of the optimizer: see :meth:`Optimizer.shared`."""
        return {} if self._local is None else self._local.shared

    def explain(self) -> str:
        """Return how the executor steps the parameters that this rank owns, if all gates are open.

        There is a line for each kind of parameter and for each stage at which a step waits. Flat
        ranges of cut parameters count as parameters. Other ranks may have other lines.

        Raises:
            RuntimeError: a class without functional equivalent, which is stepped by its own code.
        """
        return self._steps.explain()

    def gather(self) -> None:
        """Gather all trained parameters on every rank. Collective.

        Raises:
            TransportError: a rank died, or did not come within the group's timeout; names it.
        """
        self.gather_ranges().wait()

    def _total(self, addends: Mapping[str, Tensor], numbers: int) -> Tensor:
        """Return the total of addends by path, with ``numbers`` elements each; 0 for scalars."""
        return self.total(vector_of(addends, self.plan, numbers))

    @property
    def _steps(self) -> ShardOptimizer:
        if self._local is None:
            raise RuntimeError(
                f"{type(self.optim).__name__} has no functional equivalent, so it cannot be "
                "stepped by ranges; call step(), or register an equivalent with "
                "register_functional_optim()"
            )
        return self._local

    @property
    def shards(self) -> LocalShards | None:
        """The shards of this rank; None for a class without functional equivalent."""
        return None if self._local is None else self._local.owned

    @property
    def _own(self) -> LocalShards:
        return self._steps.owned

    def _changing_paths(self) -> Iterable[str]:
        """Return the parameters that may change in a step."""
        own: Collection[str] = self.params
        if not all(map(_REQUIRES_GRAD, self.params.values())):
            every = self.params.items()
            own = {path for path, one in every if one.requires_grad or one.grad is not None}
        if self._local is not None:
            own = self._local.find_changing(own)
        return own if own is self.params else filter(own.__contains__, self.params)

    def _check_hook_unscaled(self) -> None:
        """Warn that step() does nothing. Raise RuntimeError if nothing steps, or not as asked."""
        if not self.has_hook:
            raise RuntimeError(
                "overlap_with_ddp=True leaves all steps to a communication hook, and none was "
                "called: nothing was stepped. Register one before the first backward pass: "
                "ddp.register_comm_hook(None, zero_step_hook(ddp, zero)); or leave "
                "overlap_with_ddp=False"
            )
        scaling = Scaling.of(self)
        if not scaling.is_scaled:
            logger.warning(
                "step() does nothing where overlap_with_ddp=True: parameters are stepped by the "
                "communication hook, while backward goes on; take the call out of the loop"
            )
        elif scaling.grad_scale is not None or not self.hook_unscales:
            raise RuntimeError(
                "the communication hook has not unscaled gradients by this GradScaler since its "
                "last update(): if it does not know it, it has stepped by scaled gradients; give "
                "the hook grad_scaler="
            )

    def _find_memory(self, paths: Collection[str]) -> None:
        if self._memory.refresh(paths):
            self._messages.clear()
            if self._local is not None:
                self._local.update_views()
