"""DistributedOptimizer: workers own the parameters, and step them."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.engine.gradients import record_unscale
from functional_optim.engine.options import common_options, guard_schedules
from functional_optim.engine.recipes import OpaqueRecipe, Recipe, resolve_recipe, warn_opaque
from functional_optim.remote.chain_groups import ChainGroups
from functional_optim.remote.counters import Counters
from functional_optim.remote.errors import gather_results
from functional_optim.remote.not_copied import NotCopied
from functional_optim.remote.placement import PlacedGroup, Placement, place_params, place_rrefs
from functional_optim.remote.ray_transport import RayTransport, resolve_transport
from functional_optim.remote.snapshot import Snapshot, build_snapshot
from functional_optim.remote.staleness import StalenessLimit, WhenStale
from functional_optim.remote.state_dicts import merge_state_dicts, split_state_dict
from functional_optim.remote.thread_transport import ThreadTransport, make_worker
from functional_optim.remote.torch_rpc import load_torch_rpc
from functional_optim.remote.transport import START_SECONDS, Transport
from functional_optim.remote.workers import Gradients, Workers


class DistributedOptimizer(NotCopied, torch.optim.Optimizer):
    """torch's ``DistributedOptimizer``: one optimizer on each worker, over its parameters.

    A step sends each worker the gradients of its parameters. All workers step at the same time:

        on each worker w:   p_w, s_w = rule(p_w, g_w, s_w)

    The result equals, bit for bit, a step of one process with all parameters. Gradients come from a
    distributed autograd context or from the caller, never from ``.grad``. A parameter without a
    gradient does not change, and its step count does not either. Several threads and optimizers may
    step at the same time. Each worker completes one step before it starts the next. All workers
    make the steps in the same order over threads and Ray. Over RPC this holds if a step needs
    totals or the optimizer is composed.

    A step writes to parameters in place. So a backward pass fails if another trainer steps after
    its forward pass. If several trainers share parameters, each reads a :meth:`snapshot`. Over RPC,
    if modules are on the workers, put each module into a ``SnapshotModule``.

    The class is a ``torch.optim.Optimizer``. Each step reads the options in ``param_groups``, so
    any lr_scheduler works. A class with a functional equivalent is stepped by that equivalent, with
    the bits of torch's for-loop. Any other class is built on the workers as it is, with one
    warning.

    Args:
        optimizer_class: a class of torch.optim, or a registered class; one of our optimizers, or
            its constructor, such as ``adamw``; or any class that takes parameters and has
            ``step()``. The workers must be able to import a class.
        params_rref: RRefs to parameters, (name, RRef) pairs, or parameter groups of them. The
            worker that owns the value of an RRef steps it. Without names, "1.0" is the first
            parameter of the second group.
        args, kwargs: arguments of the class after ``params``.
        start_timeout: seconds for each worker to import modules and build its optimizer. Must be
            above 0; ten minutes by default. A call has the time-out of ``init_rpc``.

    Attributes:
        is_functional_optim: True if the class has a functional equivalent.

    Raises:
        TypeError: an argument is not an RRef or not an optimizer, or the class lacks an option.
        ValueError: there are no parameters, a parameter occurs twice, or a value is out of bounds.
        RuntimeError: torch's RPC is not initialised.
        WorkerError: workers failed; it has the errors of all of them. It is also a ValueError or a
            TypeError if all of these errors are.

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
        rpc = load_torch_rpc()
        groups = place_rrefs(params_rref, rpc.is_rref, rpc.fetch_meta_tensors)
        recipe = resolve_recipe(optimizer_class, args, kwargs)
        transport = rpc.RpcTransport(start_timeout=start_timeout)
        self._start_workers(recipe, groups, transport, rpc.make_worker)

    @classmethod
    def over_threads(
        cls, optimizer_class: Any, params: Any, placement: Placement, *args: Any, **kwargs: Any
    ) -> "DistributedOptimizer":
        """Return an optimizer whose workers are threads of this process.

        Compiled chains step without the GIL, so several workers can step while Python continues.
        Nothing is copied: the workers step the caller's own parameters.

        Args:
            optimizer_class: as for the class.
            params: a module, its named parameters, or parameter groups of (name, parameter) pairs.
            placement: the worker of each parameter, by name; or a plan, such as
                ``sharding.plan(model, 4)``, whose rank 1 becomes the worker "rank1".
            args, kwargs: arguments of the class after ``params``.

        Returns:
            A DistributedOptimizer; its steps take gradients. :meth:`close` ends its threads.

        Raises:
            TypeError, ValueError: as for the class; or a parameter has no worker, or the plan
                divides it.
        """
        made, groups = cls.__new__(cls), place_params(params, placement)
        recipe = resolve_recipe(optimizer_class, args, kwargs)
        made._start_workers(recipe, groups, ThreadTransport(), make_worker)  # noqa: SLF001
        return made

    @classmethod
    def over_ray(
        cls,
        optimizer_class: Any,
        params: Any,
        placement: Placement,
        *args: Any,
        transport: RayTransport | None = None,
        start_timeout: float | None = None,
        **kwargs: Any,
    ) -> "DistributedOptimizer":
        """Return an optimizer whose workers are Ray actors, on the CPU.

        It needs ``pip install "functional-optim[ray]"``. The actors step copies of the parameters,
        and the caller's parameters do not change: read the copies by :meth:`snapshot`.
        :meth:`close` ends the actors. Each call sends one flat buffer to each worker, through Ray's
        shared memory on one machine. If an actor is lost, a WorkerError names it; ``snapshot`` and
        ``state_dict(workers=...)`` save everything on the other actors.

        Args:
            transport: for actors with options, for another limit than 60 s per call, or for actors
                that several optimizers share. :meth:`close` does not close this transport.
            start_timeout: seconds for each actor to start and to build its optimizer. Must be above
                0; ten minutes by default. Not allowed with ``transport``, which has its own.
            optimizer_class, params, placement, args, kwargs: as for :meth:`over_threads`.

        Raises:
            ImportError, RuntimeError: Ray is not installed; ``ray.init`` was not called.
            TypeError, ValueError, WorkerError: as for the class and :meth:`over_threads`.
        """
        made, groups, close = cls.__new__(cls), place_params(params, placement), transport is None
        recipe = resolve_recipe(optimizer_class, args, kwargs)
        actors = resolve_transport(transport, start_timeout)
        from functional_optim.remote.ray_actor import make_actor_worker  # noqa: PLC0415  needs Ray

        made._start_workers(recipe, groups, actors, make_actor_worker, close=close)  # noqa: SLF001
        return made

    def _start_workers(
        self,
        recipe: Recipe | OpaqueRecipe,
        groups: Sequence[PlacedGroup],
        transport: Transport,
        make_worker: Callable[..., Any],
        *,
        close: bool = True,
    ) -> None:
        self.is_functional_optim = not isinstance(recipe, OpaqueRecipe)
        if isinstance(recipe, OpaqueRecipe):
            warn_opaque(recipe, stacklevel=3)
        own = self._chain_groups = ChainGroups(groups, recipe)
        self._workers = Workers(transport, own, make_worker, close=close)
        self._send_lock, self._limit = threading.RLock(), StalenessLimit()
        self._built = False
        defaults = dict(recipe.defaults)
        options = self._workers.initial_options()
        super().__init__(list(map(PlacedGroup.to_torch, own.groups, options)), defaults)
        self.defaults = defaults or common_options(options, options)
        # The state is on the workers. torch.distributed.checkpoint.state_dict makes a step if
        # ``optimizer.state`` has no entries.
        self.state.update({one: {} for group in self.param_groups for one in group["params"]})
        self._built = True

    @property
    def workers(self) -> tuple[str, ...]:
        """Return the names of the workers that own parameters."""
        return tuple(self._workers.worker_groups)

    @property
    def remote_optimizers(self) -> list[Any]:
        """Return the handle of each worker's optimizer: over RPC an RRef."""
        return list(self._workers.handles.values())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise NotImplementedError after construction: give all groups to the constructor."""
        if self._built:
            raise NotImplementedError(
                "groups cannot be added to a DistributedOptimizer: make one with all groups, and "
                "load the state_dict() of this one into it"
            )
        self.param_groups.append(guard_schedules(param_group, self.defaults))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: each context, or each call of :meth:`step`, has its own gradients."""

    def step(  # type: ignore[override]  # as torch's has it
        self, context_id: Gradients, snapshot: Snapshot | None = None
    ) -> None:
        """Step on all workers at the same time; return when all steps are complete.

        Args:
            context_id: the id of the distributed autograd context with the gradients; or the
                gradients, in a list, or in a mapping by name.
            snapshot: the snapshot that the gradients were computed from. The step closes it.

        Raises:
            TypeError, ValueError: gradients or groups that do not fit. Nothing changes.
            RuntimeError: the context is not open in this process.
            WorkerError: a worker cannot use the options, and no worker steps. Or workers failed or
                gave no answer (such a worker may have stepped), and all other workers have stepped.
                It is a StaleError if gradients are older than :meth:`limit_staleness` allows.
        """
        sources = self._workers.locate(context_id)
        with self._limit.track_step(snapshot):
            versions = self._limit.gradient_versions(snapshot, self.workers)
            with self._send_lock:  # all workers get the steps of one optimizer in the same order
                self._chain_groups.check_step(self.param_groups)
                steps = self._workers.send_step(sources, self.param_groups, versions)
            gather_results("step", steps)

    def snapshot(self, *, workers: Collection[str] | None = None) -> Snapshot:
        """Return a copy-on-write snapshot of all parameters, which no step changes.

        Over threads and Ray, a snapshot contains each step of this optimizer either on all workers
        or on none. Over threads, it shares memory with the parameters until a step writes to them.
        Otherwise each worker sends a copy in one buffer.

        Args:
            workers: read these workers only, for example if other workers are lost.

        Returns:
            A :class:`Snapshot` for one trainer. Pass it to :meth:`step` with the gradients.

        Raises:
            ValueError, WorkerError: no such worker; workers failed or gave no answer.
        """
        chosen = self._workers.select(workers)
        order = [one.name for one in self._chain_groups.params if one.worker in chosen]
        with self._limit.track_reading() as leave:
            with self._send_lock:
                futures = self._workers.send_read(chosen)
            readings = gather_results("snapshot", futures)
            return build_snapshot(readings, self._workers.names, order, leave)

    def limit_staleness(self, max_staleness: int | None, when_stale: WhenStale = "refuse") -> None:
        """Limit the age of gradients: the number of steps since their snapshot was read.

        The limit applies to gradients of a snapshot, and to gradients of a context whose passes ran
        through a ``SnapshotModule``. The age of other gradients is unknown.

        Args:
            max_staleness: s, at least 0; None for no limit.
            when_stale: ``"refuse"``: a step with older gradients raises, and no worker makes it.
                (If a step of another optimizer comes between, some workers may have made it.)
                ``"wait"``: :meth:`snapshot`, and a step without a snapshot, wait until no gradient
                can become too old: until slower trainers have stepped, closed or lost their
                snapshots. This applies to trainers that share this optimizer. Gradients that steps
                of other optimizers make too old, and gradients of contexts, are refused. A trainer
                must pass its snapshot to a step, or close it, before it asks for another snapshot;
                otherwise it waits for itself.

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

        Call it before :meth:`step`. Each worker sends one number for each parameter. The numbers
        are summed in the order of the parameters, so the norm does not depend on the placement.

        Args:
            gradients: as for :meth:`step`; they are changed in place.
            max_norm: the largest norm, c.
            norm_type: p, above 0; may be infinite.
            error_if_nonfinite: raise if the norm is NaN or infinite.

        Returns:
            The norm before clipping, a 0-d float64 tensor.

        Raises:
            ValueError: ``norm_type`` is not above 0, or ``max_norm`` is below 0.
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is True.
        """
        given = self._workers.locate(gradients), max_norm, norm_type
        total = self._workers.clip(*given, error_if_nonfinite=error_if_nonfinite)
        return torch.tensor(total, dtype=torch.float64)

    def unscale_(self, gradients: Gradients, scaler: torch.amp.GradScaler) -> bool:
        """Divide the gradients of all workers by GradScaler's scale, and record if all are finite.

        ``scaler.unscale_(optimizer)`` reads ``.grad``. Use this method instead::

            optimizer.unscale_(context_id, scaler)
            scaler.step(optimizer, context_id)
            scaler.update()

        If a gradient on any worker is not finite, no worker steps.

        Args:
            gradients: as for :meth:`step`; they are changed in place.
            scaler: the scaler of the loss.

        Returns:
            True if an element is not finite.

        Raises:
            RuntimeError: called twice for one step, or this scaler has scaled no loss.
        """
        sources, call = self._workers.locate(gradients), self._workers.on_gradients
        return record_unscale(
            scaler, self, lambda scale: any(call("unscale_", sources, scale).values())
        )

    def state_dict(self, *, workers: Collection[str] | None = None) -> dict[str, Any]:
        """Return the options and state of all workers in torch's format, and the placement.

        Parameters are numbered group by group, as in torch. So the torch.optim class can load the
        state dict, and so can an optimizer with another placement.

        Args:
            workers: ask these workers only, for example if other workers are lost. Take the missing
                entries of "state" from an earlier state dict.

        Returns:
            ``{"state": ..., "param_groups": ..., "workers": {worker: names of its parameters}}``;
            its tensors are copies, on the CPU.

        Raises:
            ValueError, WorkerError: no such worker; workers failed or gave no answer.
        """
        chosen, groups = self._workers.select(workers), self._chain_groups.groups
        with self._send_lock:
            parts = self._workers.state_dicts(self.param_groups, chosen)
            of = self._workers.worker_groups, groups, self.param_groups
            return merge_state_dicts(parts, *of, opaque=not self.is_functional_optim)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of :meth:`state_dict` or of the equivalent torch.optim class.

        The placement of parameters may differ. Parameters are matched by name if both sides have
        names, otherwise by their index, as in torch.

        Raises:
            ValueError: other groups or parameters.
            WorkerError: a state does not fit. All workers keep the state that they had.
        """
        parts, options = split_state_dict(
            state_dict, self._workers.worker_groups, self._chain_groups.groups
        )
        with self._send_lock:
            self._workers.load(parts)
            for number, (own, group) in enumerate(zip(options, self.param_groups, strict=True)):
                group.update(self._chain_groups.loaded_options(own, group))
                self.param_groups[number] = guard_schedules(group, self.defaults)

    def counters(self) -> dict[str, Counters]:
        """Return the counters of this optimizer, by worker: steps, waits, bytes, staleness."""
        return self._workers.counters(self._limit.waits)

    def close(self) -> None:
        """Release the workers, and end threads and actors, after the steps that were sent."""
        self._workers.close()
