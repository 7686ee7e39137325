"""Workers of one optimizer: calls to all workers at the same time."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.distributed import is_valid_context
from functional_optim.engine.gradients import (
    addends,
    check_and_unscale_,
    clip,
    scale_,
    sum_in_order,
)
from functional_optim.engine.messages import format_value
from functional_optim.engine.options import options_of
from functional_optim.engine.recipes import ComposedRecipe
from functional_optim.engine.states import own_copy
from functional_optim.engine.tensors import check_fit, check_grad, clone_aliased
from functional_optim.remote.chain_groups import ChainGroups
from functional_optim.remote.counters import Counters
from functional_optim.remote.errors import collect_results, gather_results, worker_error
from functional_optim.remote.placement import groups_by_worker, name_gradients
from functional_optim.remote.snapshot import Reading
from functional_optim.remote.staleness import GradientVersions
from functional_optim.remote.transport import Transport

Gradients = Any
"""The id of a distributed autograd context; or a gradient, or None, for each parameter: a list, or
a mapping by name. A parameter that the mapping lacks has no gradient."""

Sources = Mapping[str, Any]
"""The source of each worker's gradients: the gradients, or the id of an autograd context."""

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups with their current options."""


_LOCAL: Mapping[str, Callable[[Any, float], Any]] = {
    "addends": addends,
    "scale_": scale_,
    "unscale_": check_and_unscale_,
}
"""Operations on gradients in this process. Workers have methods with the same names."""


class Workers:
    """Optimizers on workers, one on each worker."""

    def __init__(
        self,
        transport: Transport,
        chain_groups: ChainGroups,
        make_worker: Callable[..., Any],
        *,
        close: bool = True,
    ) -> None:
        self.transport = transport
        self._close = close
        groups, recipe = chain_groups.groups, chain_groups.recipe
        self.worker_groups = groups_by_worker(groups)
        self.names = {
            worker: [name for group in own for name, _ in group.params]
            for worker, own in self.worker_groups.items()
        }
        """The names of each worker's parameters."""
        self._groups, self._given = groups, chain_groups.params
        self._params = [one for group in groups for one in group.params]
        self._waits = dict.fromkeys(self.worker_groups, 0)
        self._running_steps: dict[str, list[Future[None]]] = {
            worker: [] for worker in self.worker_groups
        }
        placed = {
            worker: transport.place(worker, make_worker, recipe, own)
            for worker, own in self.worker_groups.items()
        }
        handles, errors = collect_results(placed)
        if errors:
            self.close()
            raise worker_error("the constructor", errors, len(placed))
        self.handles: dict[str, Any] = handles
        self._descriptions = gather_results("the constructor", self._call("describe"))
        self._num_totals: int = max(one[0] for one in self._descriptions.values())
        # Totals and shared scalars depend on the state after the previous step.
        self._needs_order = isinstance(recipe, ComposedRecipe) or self._num_totals > 0

    def initial_options(self) -> list[dict[str, Any]]:
        """Return the first options of each group, including the defaults of its workers."""
        made = [dict(group.options) for group in self._groups]
        for worker, groups in self.worker_groups.items():
            # A class of the user may have fewer groups than it was given.
            for group, own in zip(groups, self._descriptions[worker][1], strict=False):
                made[group.number] = {**own, **made[group.number]}
        return made

    def locate(self, gradients: Gradients) -> Sources:
        """Return the source of each worker's gradients."""
        if not isinstance(gradients, int) or isinstance(gradients, bool):
            by_name = name_gradients(gradients, self._given)
            for one in self._params:
                grad = by_name[one.name]
                if grad is not None:
                    check = check_fit if one.like.is_meta else check_grad
                    check(one.like, grad, one.name)
            return {
                worker: [by_name[name] for name in names] for worker, names in self.names.items()
            }
        if not self.transport.has_contexts:
            raise TypeError(
                f"these workers have no distributed autograd contexts, got the id {gradients}; "
                "give step the gradients"
            )
        if not is_valid_context(gradients):
            raise RuntimeError(
                f"there is no distributed autograd context {gradients} in this process; call step "
                "inside of torch.distributed.autograd.context(), with the id that it gave"
            )
        return dict.fromkeys(self.worker_groups, gradients)

    def on_gradients(self, method: str, sources: Sources, value: float) -> dict[str, Any]:
        """Call a method with the gradients of each worker, where they are, and a number."""
        if all(isinstance(source, list) for source in sources.values()):
            return {worker: _LOCAL[method](grads, value) for worker, grads in sources.items()}
        arguments = {worker: (source, value) for worker, source in sources.items()}
        return gather_results(method, self._call(method, arguments))

    def clip(
        self, sources: Sources, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> float:
        """Scale gradients to a joint norm of at most ``max_norm``. Return the norm before."""
        return clip(
            lambda order: self._order_by_parameter(self.on_gradients("addends", sources, order)),
            lambda factor: self.on_gradients("scale_", sources, factor),
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    def select(self, workers: Collection[str] | None) -> list[str]:
        """Return the workers with these names, in the order of all workers; all for None."""
        unknown = sorted({*(workers or ())} - {*self.worker_groups})
        if unknown or isinstance(workers, str):
            raise ValueError(
                f"workers must be names of workers, in a list, got {format_value(workers)}; there "
                f"are {', '.join(map(repr, self.worker_groups))}"
            )
        return [worker for worker in self.worker_groups if workers is None or worker in workers]

    def send_read(self, workers: Collection[str]) -> dict[str, "Future[Reading]"]:
        return self._call("read", dict.fromkeys(workers, ()))

    def send_step(
        self, sources: Sources, groups: Groups, read_at: Mapping[str, GradientVersions]
    ) -> dict[str, "Future[Any]"]:
        """Compute the totals of a step, then send the step to all workers.

        ``read_at`` has the versions that each worker's gradients are of; it is empty if no limit
        applies. If some gradients are too old, no step is sent.
        """
        if any(one.max_staleness is not None for one in read_at.values()):
            # The check reads the age from read_at, or from an autograd context. It needs no
            # gradients, so without contexts no source is sent.
            sends = self.transport.has_contexts
            checks = {
                worker: (sources[worker] if sends else None, one) for worker, one in read_at.items()
            }
            gather_results("step", self._call("check", checks))
        options = self._worker_options(groups)
        if self._needs_order and not self.transport.keeps_order:
            wait([one for sent in self._running_steps.values() for one in sent])
        sources = self._copy_aliased(sources)
        totals = self._compute_totals(sources, options)
        more = (totals,) if totals or read_at else ()  # short messages: leave out the defaults
        ages = {worker: (one,) for worker, one in read_at.items()}
        arguments = {
            worker: (sources[worker], options[worker], *more, *ages.get(worker, ()))
            for worker in self.handles
        }
        futures = self._call("step", arguments)
        for worker, future in futures.items():
            running = [one for one in self._running_steps[worker] if not one.done()]
            self._waits[worker] += bool(running)
            self._running_steps[worker] = [*running, future]
        return futures

    def _copy_aliased(self, sources: Sources) -> Sources:
        """Copy gradients that share memory with parameters: another worker may step first."""
        params = [one.like for one in self._params]
        return {
            worker: clone_aliased(own, params) if isinstance(own, list) else own
            for worker, own in sources.items()
        }

    def _order_by_parameter(self, found: Mapping[str, Tensor]) -> list[Any]:
        """Return the workers' numbers or rows, one per parameter, in the order of the groups."""
        by_name: dict[str, Any] = {}
        for worker, names in self.names.items():
            by_name.update(zip(names, found[worker].tolist(), strict=True))
        return [by_name[one.name] for one in self._params]

    def state_dicts(self, groups: Groups, workers: Collection[str]) -> dict[str, Any]:
        options = self._worker_options(groups)
        arguments = {worker: (options[worker],) for worker in workers}
        found: dict[str, Any] = gather_results("state_dict", self._call("state_dict", arguments))
        return own_copy(found)  # type: ignore[no-any-return]  # results may be in shared memory

    def load(self, parts: Mapping[str, Any]) -> None:
        """Load a state dict on all workers, or, if one of them raises an error, on none."""
        futures = self._call("load_state_dict", {worker: (part,) for worker, part in parts.items()})
        loaded, errors = collect_results(futures)
        finishing = {
            worker: self.transport.call(self.handles[worker], "finish_load", not errors)
            for worker in loaded
        }
        if errors:
            collect_results(finishing)
            raise worker_error("load_state_dict", errors, len(futures))
        gather_results("load_state_dict", finishing)

    def counters(self, read_waits: int) -> dict[str, Counters]:
        """Return each worker's counters; ``read_waits`` is the same in all of them."""
        found: dict[str, Counters] = gather_results("counters", self._call("counters"))
        return {
            worker: one._replace(waits=one.waits + self._waits[worker], read_waits=read_waits)
            for worker, one in found.items()
        }

    def close(self) -> None:
        """Release all workers; a transport may first complete the calls that were sent."""
        self.handles = {}
        if self._close:
            self.transport.close()

    def _call(
        self, method: str, arguments: Mapping[str, tuple[Any, ...]] | None = None
    ) -> dict[str, Any]:
        """Call a method of all workers, or of those in ``arguments``. Return a Future for each."""
        if not self.handles:
            raise RuntimeError(
                f"this optimizer is closed, so its workers cannot {method}: make another one, and "
                "load the state_dict() of before into it"
            )
        return {
            worker: self.transport.call(self.handles[worker], method, *own)
            for worker, own in (arguments or dict.fromkeys(self.handles, ())).items()
        }

    def _worker_options(self, groups: Groups) -> dict[str, tuple[dict[str, Any], ...]]:
        """Return the current options of each worker's groups.

        They are in a tuple: a transport may send each list in a buffer of its own.
        """
        return {
            worker: tuple(options_of(groups[group.number]) for group in own)
            for worker, own in self.worker_groups.items()
        }

    def _compute_totals(
        self, sources: Sources, options: Mapping[str, tuple[dict[str, Any], ...]]
    ) -> list[Tensor]:
        """Return the totals that stages need, summed in the order of the parameters."""
        totals: list[Tensor] = []
        for _ in range(self._num_totals):
            arguments = {
                worker: (sources[worker], options[worker], tuple(totals)) for worker in self.handles
            }
            addends = gather_results("measure", self._call("measure", arguments))
            totals.append(_total(self._order_by_parameter(addends)))
        return totals


def _total(found: Sequence[Any]) -> Tensor:
    """Return the sum of numbers; for rows, the sum of each column."""
    if isinstance(found[0], list):
        return torch.stack([_total(column) for column in zip(*found, strict=True)])
    return sum_in_order(found)
