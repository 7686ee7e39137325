"""DistributedOptimizer: parameters live on workers, and are stepped where they live."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_optim.frontends.local_optimizer import Foreign, resolved, warn_of
from functional_optim.frontends.loss_scale import record
from functional_optim.frontends.recipe import Recipe
from functional_optim.frontends.torch_groups import common_options
from functional_optim.frontends.torch_schedule import guarded
from functional_optim.remote import placing, states
from functional_optim.remote.arranged import Arranged
from functional_optim.remote.counters import Counters
from functional_optim.remote.errors import all_of
from functional_optim.remote.ray_transport import RayTransport, given_or_made, make_in_actor
from functional_optim.remote.snapshot import Snapshot, joined
from functional_optim.remote.sources import Gradients, clip, sources_of, unscale, where
from functional_optim.remote.staleness import StalenessLimit, WhenStale
from functional_optim.remote.threads import ThreadTransport, make_worker
from functional_optim.remote.torch_rpc import torch_rpc
from functional_optim.remote.transport import START_SECONDS, Transport
from functional_optim.remote.workers import Sources, Workers


class DistributedOptimizer(torch.optim.Optimizer):
    """torch's ``DistributedOptimizer``: one optimizer on each worker, over the parameters there.

    A step hands every worker its own gradients, and the workers step at once:

        on each worker w:   p_w, s_w = rule(p_w, g_w, s_w)

    with the numbers of one process that had all parameters, bit for bit. Gradients are those of a
    distributed autograd context, or are given; never ``.grad``. A parameter without one is left
    alone, its step count too. Several threads and optimizers may step at once: on a worker, steps
    are made one by one, each whole; over threads and Ray, and over RPC where a step needs totals or
    the optimizer is composed, in the same order on all workers.

    A step writes to parameters in place, and fails the backward pass of whoever is between forward
    and backward then. Where several trainers share parameters, let each read a :meth:`snapshot`, or
    over RPC, where modules are on the workers, put each into a ``SnapshotModule``.

    It is a ``torch.optim.Optimizer``: options are read from ``param_groups`` at every step, so
    that any lr_scheduler works. What has a functional equivalent is stepped by that, bit for bit as
    torch's for-loop; any other class is made on the workers as it is, with one warning.

    Args:
        optimizer_class: a class of torch.optim, or a registered one; one of our optimizers, or a
            constructor of one, such as ``adamw``; or any class that takes parameters and has
            ``step()``. A class must be importable on the workers.
        params_rref: RRefs to parameters, (name, RRef) pairs, or parameter groups of them. The
            worker that owns an RRef's value steps it. Without names, "1.0" is the first parameter
            of the second group.
        args, kwargs: the class's arguments after ``params``.
        start_timeout: seconds for each worker to import what it needs and make its optimizer; above
            0, ten minutes by default. A call has the time-out of ``init_rpc``.

    Attributes:
        is_functional_optim: whether the class has a functional equivalent.

    Raises:
        TypeError: something that is no RRef, or no optimizer; an option that the class lacks.
        ValueError: no parameters, one twice, a value out of bounds.
        RuntimeError: torch's RPC is not initialised.
        WorkerError: workers failed; it has the errors of all of them. It is a ValueError too where
            all of those are, and a TypeError likewise.

    Over RPC, inside a process that called ``init_rpc``::

        optimizer = DistributedOptimizer(torch.optim.AdamW, [rref, other], lr=1e-3)
        with torch.distributed.autograd.context() as context_id:
            loss = ...
            torch.distributed.autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    Example::

        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = DistributedOptimizer.over_threads(
        ...     torch.optim.AdamW, model, {"weight": "first", "bias": "second"}, lr=0.1)
        >>> loss = model(torch.ones(1, 2)).sum()
        >>> optimizer.step(torch.autograd.grad(loss, list(model.parameters())))
        >>> optimizer.counters()["second"].steps
        1
        >>> sorted(optimizer.state_dict()["workers"].items())
        [('first', ['weight']), ('second', ['bias'])]
        >>> optimizer.close()
    """

    def __init__(
        self,
        optimizer_class: Any,
        params_rref: Any,
        *args: Any,
        start_timeout: float = START_SECONDS,
        **kwargs: Any,
    ) -> None:
        rpc = torch_rpc()
        groups = placing.from_rrefs(params_rref, rpc.is_rref, rpc.owner_of, rpc.likes_of)
        found = resolved(optimizer_class, args, kwargs)
        self._begin(found, groups, rpc.RpcTransport(start_timeout=start_timeout), rpc.make_worker)

    @classmethod
    def over_threads(
        cls,
        optimizer_class: Any,
        params: Any,
        placement: placing.Placement,
        *args: Any,
        **kwargs: Any,
    ) -> "DistributedOptimizer":
        """An optimizer whose workers are threads of this process.

        They step without the GIL where the chain is compiled, so several may at once, and one may
        while Python goes on. Nothing is copied: parameters stay the objects that they are.

        Args:
            optimizer_class: as for the class.
            params: a module, its named parameters, or parameter groups of (name, parameter) pairs.
            placement: the worker of each parameter, by name; or a plan, such as
                ``sharding.plan(model, 4)``, whose rank 1 becomes the worker "rank1".
            args, kwargs: the class's arguments after ``params``.

        Returns:
            A DistributedOptimizer; its steps take gradients. :meth:`close` ends its threads.

        Raises:
            TypeError, ValueError: as for the class; a parameter placed nowhere, or cut by the plan.
        """
        made = cls.__new__(cls)
        groups = placing.from_placement(params, placement)
        found = resolved(optimizer_class, args, kwargs)
        made._begin(found, groups, ThreadTransport(), make_worker)  # noqa: SLF001  of this class
        return made

    @classmethod
    def over_ray(
        cls,
        optimizer_class: Any,
        params: Any,
        placement: placing.Placement,
        *args: Any,
        transport: RayTransport | None = None,
        start_timeout: float | None = None,
        **kwargs: Any,
    ) -> "DistributedOptimizer":
        """An optimizer whose workers are Ray actors: ``pip install "functional-optim[ray]"``.

        Parameters are copied to the actors, on the CPU, and live there from then on; those here
        stay as they are. Read them by :meth:`snapshot`; :meth:`close` ends the actors. Each call is
        one flat buffer for each worker, on one machine in Ray's shared memory. A lost actor is a
        WorkerError with its name; ``snapshot`` and ``state_dict(workers=...)`` save the others.

        Args:
            transport: for actors with options, another limit than 60 s for a call, or actors that
                several optimizers share; :meth:`close` leaves it open.
            start_timeout: seconds for each actor to start and to make its optimizer; above 0, ten
                minutes by default. A transport that is given has its own.
            optimizer_class, params, placement, args, kwargs: as for :meth:`over_threads`.

        Raises:
            ImportError, RuntimeError: Ray is not installed; ``ray.init`` was not called.
            TypeError, ValueError, WorkerError: as for the class and :meth:`over_threads`.
        """
        made, own = cls.__new__(cls), transport is None
        groups = placing.from_placement(params, placement)
        found = resolved(optimizer_class, args, kwargs)
        transport = given_or_made(transport, start_timeout)
        made._begin(found, groups, transport, make_in_actor, close=own)  # noqa: SLF001  of this class
        return made

    def _begin(
        self,
        found: Recipe | Foreign,
        groups: Sequence[placing.PlacedGroup],
        transport: Transport,
        make: Callable[..., Any],
        *,
        close: bool = True,
    ) -> None:
        """Make the optimizers on all workers."""
        self.is_functional_optim = not isinstance(found, Foreign)
        if isinstance(found, Foreign):
            warn_of(found, stacklevel=3)
        own = self._arranged = Arranged(groups, found)
        self._workers = Workers(transport, own.groups, make, own.found, close=close)
        self._order, self._limit = threading.RLock(), StalenessLimit()
        self._built = False
        defaults = {} if isinstance(found, Foreign) else dict(found.defaults)
        options = self._workers.first_options()
        super().__init__(list(map(placing.torch_group, own.groups, options)), defaults)
        self.defaults = defaults or common_options(options, options)
        self.state.update(placing.empty_entries(self.param_groups))
        self._built = True

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the workers that own parameters."""
        return tuple(self._workers.shares)

    @property
    def remote_optimizers(self) -> list[Any]:
        """The handle of each worker's optimizer: over RPC an RRef."""
        return list(self._workers.handles.values())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups are made with the optimizer.

        Raises:
            NotImplementedError: it was made already.
        """
        if self._built:
            raise NotImplementedError(
                "groups cannot be added to a DistributedOptimizer: make one with all groups, and "
                "load the state_dict() of this one into it"
            )
        self.param_groups.append(guarded(param_group, self.defaults))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: each context, or each call of :meth:`step`, has gradients of its own."""

    def step(  # type: ignore[override]  # as torch's has it
        self, context_id: Gradients, snapshot: Snapshot | None = None
    ) -> None:
        """Step on every worker, at once; return when all steps are made.

        Args:
            context_id: of the distributed autograd context that holds the gradients; or the
                gradients, in a list, or in a mapping by name.
            snapshot: from which they were computed; it is given back.

        Raises:
            TypeError, ValueError: gradients that do not fit; nothing is changed then.
            RuntimeError: a context that is not open here.
            WorkerError: options that no worker can take, and none steps; or workers failed or gave
                no answer (one of these may have made the step), and the others have made it. It is
                a StaleError where gradients are older than :meth:`limit_staleness` allows.
        """
        sources = self._sources(context_id)
        with self._limit.one_step(snapshot):
            taken = self._limit.taken(snapshot, self.workers)
            with self._order:  # the steps of one optimizer go to all workers in one order
                self._arranged.check(self.param_groups)
                asked = self._workers.send_step(sources, self.param_groups, taken)
            self._workers.answers(asked)

    def snapshot(self, *, workers: Collection[str] | None = None) -> Snapshot:
        """The parameters of all workers as they are now, which no step changes.

        Over threads and Ray, of steps of this optimizer it has all of one on all workers, or
        nothing. Over threads it shares memory with the parameters as long as no step comes while
        someone reads; otherwise each worker sends a copy, in one buffer.

        Args:
            workers: of these alone, where others are lost.

        Returns:
            A :class:`Snapshot`, of this trainer's own. Hand it to :meth:`step` with the gradients.

        Raises:
            ValueError, WorkerError: no such worker; workers failed or gave no answer.
        """
        chosen = self._workers.chosen(workers)
        order = [one.name for one in self._arranged.given if one.worker in chosen]
        with self._limit.reading() as leave:
            with self._order:
                futures = self._workers.send_read(chosen)
            return joined(all_of("snapshot", futures), self._workers.names, order, leave)

    def limit_staleness(self, max_staleness: int | None, when_stale: WhenStale = "refuse") -> None:
        """Bound how many steps old gradients may be: those made since their snapshot was read.

        That holds for gradients of a snapshot, and for those of a context whose passes ran through
        a ``SnapshotModule``; of others nobody knows the age.

        Args:
            max_staleness: s, at least 0; None for no bound.
            when_stale: ``"refuse"``: a step that is too old raises, and no worker makes it (if
                another optimizer's step comes between, some may have). ``"wait"``:
                :meth:`snapshot`, and a step without one, wait before that can happen, until slower
                trainers have stepped, closed or lost their snapshots. That is among the trainers
                that share this optimizer; what other optimizers make too old, and what contexts
                read, is refused. Who holds a snapshot must hand it to its step, or close it, before
                it asks for another one, or it waits for itself.

        Raises:
            TypeError, ValueError: another value.
        """
        self._limit.set(max_staleness, when_stale)

    def clip_grad_norm_(
        self,
        gradients: Gradients,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` of the gradients of all workers.

            n = (sum over all workers, over all elements, of |g|^p)^(1/p)
            g = g * min(1, c / (n + 1e-6))

        Call it before :meth:`step`. Each worker sends one number for each parameter, and they are
        summed in the order of the parameters, so the norm does not depend on who owns what.

        Args:
            gradients: as for :meth:`step`; they are changed in place.
            max_norm: the largest norm, c.
            norm_type: p, above 0; may be infinite.
            error_if_nonfinite: raise where the norm is NaN or infinite.

        Returns:
            The norm before, a 0-d float64 tensor.

        Raises:
            ValueError: ``norm_type`` is not above 0, or ``max_norm`` below 0.
            RuntimeError: the norm is not finite, where that is to be an error.
        """
        sources, there = self._sources(gradients), where(gradients, self._workers)
        return clip(sources, there, self._workers, max_norm, norm_type, error_if_nonfinite)

    def unscale_(self, gradients: Gradients, scaler: torch.amp.GradScaler) -> bool:
        """Divide the gradients of all workers by GradScaler's scale, and tell it what was found.

        ``scaler.unscale_(optimizer)`` looks for ``.grad``; this takes its place::

            optimizer.unscale_(context_id, scaler)
            scaler.step(optimizer, context_id)
            scaler.update()

        and where some gradient on some worker is not finite, no worker steps.

        Args:
            gradients: as for :meth:`step`; they are changed in place.
            scaler: that scaled the loss.

        Returns:
            Whether some element is not finite.

        Raises:
            RuntimeError: called twice for one step, or no loss was scaled by this scaler.
        """
        sources, there = self._sources(gradients), where(gradients, self._workers)
        return record(scaler, self, partial(unscale, sources, there))

    def state_dict(self, *, workers: Collection[str] | None = None) -> dict[str, Any]:
        """Options and state of all workers: torch's form, and who had what.

        Parameters are numbered group by group, as torch numbers them, so that the torch.optim class
        loads it, and an optimizer whose parameters are on other workers.

        Args:
            workers: of these alone, where others are lost. What is missing under "state" can be
                taken from an earlier state dict.

        Returns:
            ``{"state": ..., "param_groups": ..., "workers": {worker: names of its parameters}}``;
            its tensors are copies, on the CPU.

        Raises:
            ValueError, WorkerError: no such worker; workers failed or gave no answer.
        """
        chosen, groups = self._workers.chosen(workers), self._arranged.groups
        with self._order:
            parts = self._workers.state_dicts(self.param_groups, chosen)
            return states.merged(parts, self._workers.shares, groups, self.param_groups)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` or the equivalent torch.optim class wrote.

        Parameters may be on other workers than they were. They are matched by name where both
        sides have names, and otherwise by their place, as in torch.

        Raises:
            ValueError: other groups or parameters.
            WorkerError: a state that does not fit; all workers are as they were before.
        """
        parts, options = states.cut(state_dict, self._workers.shares, self._arranged.groups)
        with self._order:
            self._workers.load(parts)
            for number, (own, group) in enumerate(zip(options, self.param_groups, strict=True)):
                group.update(self._arranged.options_in(own, group))
                self.param_groups[number] = guarded(group, self.defaults)

    def counters(self) -> dict[str, Counters]:
        """Return the counters of this optimizer, by worker: steps, waits, bytes, staleness."""
        return self._workers.counters(self._limit.waits)

    def close(self) -> None:
        """Let go of the workers; threads and actors end. Steps that were sent are made first."""
        self._workers.close()

    def _sources(self, gradients: Gradients) -> Sources:
        """Return the checked source of gradients of each worker."""
        return sources_of(gradients, self._workers, self._arranged)
