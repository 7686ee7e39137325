"""All workers of one optimizer, called at once."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.aliasing import apart_from
from functional_optim.core.brief import brief
from functional_optim.core.checks import check_fit, check_grad
from functional_optim.frontends import gradient_norms
from functional_optim.frontends.local_optimizer import Foreign
from functional_optim.frontends.loss_scale import unscaled
from functional_optim.frontends.recipe import ComposedRecipe, Recipe
from functional_optim.frontends.torch_checkpoint import own_copy
from functional_optim.kernels.totals import sum_in_order
from functional_optim.remote.counters import Counters
from functional_optim.remote.errors import all_of, failed, settled
from functional_optim.remote.options import AcknowledgedOptions, MissingOptionsError, Numbered
from functional_optim.remote.placing import PlacedGroup, shares_of
from functional_optim.remote.snapshot import Reading
from functional_optim.remote.staleness import GradientVersions
from functional_optim.remote.transport import Transport

Sources = Mapping[str, Any]
"""For each worker, where its gradients are found."""

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups, with their options of now."""


class Asked(NamedTuple):
    """Calls that were sent, all of one method that takes options."""

    method: str
    options: dict[str, Numbered]
    given: dict[str, tuple[Any, ...]]
    """What each worker is given before the options, and after them."""
    futures: dict[str, "Future[Any]"]


class Workers:
    """The optimizers that were placed on workers, one on each.

    Args:
        transport: reaches the workers.
        groups: of parameters.
        make: makes the optimizer of a worker, there.
        found: what makes the optimizer over parameters.
        close: whether the transport is closed at the end.

    Raises:
        WorkerError: it cannot be made on some; what was placed is let go of.
    """

    def __init__(
        self,
        transport: Transport,
        groups: Sequence[PlacedGroup],
        make: Callable[..., Any],
        found: Recipe | Foreign,
        *,
        close: bool = True,
    ) -> None:
        self.transport = transport
        self._close = close
        self.shares = shares_of(groups)
        self.names = {
            worker: [name for share in shares for name, _ in share.params]
            for worker, shares in self.shares.items()
        }
        """Of the parameters of each worker."""
        self._groups = groups
        self._waits = dict.fromkeys(self.shares, 0)
        self._sent: dict[str, list[Future[None]]] = {worker: [] for worker in self.shares}
        placed = {
            worker: transport.place(worker, make, found, shares)
            for worker, shares in self.shares.items()
        }
        handles, errors = settled(placed)
        if errors:
            self.close()
            raise failed("the constructor", errors, len(placed))
        self.handles: dict[str, Any] = handles
        self._about = all_of("the constructor", self._call("about"))
        self._measured_stages: int = max(one[0] for one in self._about.values())
        # Totals are of the state after the step before, and so is what belongs to no parameter.
        self._wants_order = isinstance(found, ComposedRecipe) or self._measured_stages > 0
        self._options = AcknowledgedOptions(
            {worker: [share.number for share in own] for worker, own in self.shares.items()}
        )

    def first_options(self) -> list[dict[str, Any]]:
        """Return the first options of each group, with its workers' defaults."""
        made = [dict(group.options) for group in self._groups]
        for worker, shares in self.shares.items():
            # A class of the user's may keep fewer groups than it was given.
            for share, own in zip(shares, self._about[worker][1], strict=False):
                made[share.number] = {**own, **made[share.number]}
        return made

    def dealt(self, gradients: Sequence[Sequence[Tensor | None]]) -> Sources:
        """Each worker's part of gradients that stand group by group.

        Raises:
            TypeError, ValueError: one that does not fit its parameter.
        """
        for group, own in zip(self._groups, gradients, strict=True):
            for one, grad in zip(group.params, own, strict=True):
                if grad is not None:
                    check = check_fit if one.like.is_meta else check_grad
                    check(one.like, grad, one.name)
        return {
            worker: [gradients[share.number][place] for share in shares for place in share.places]
            for worker, shares in self.shares.items()
        }

    def chosen(self, workers: Collection[str] | None) -> list[str]:
        """Some workers by name, in their own order; all for None.

        Raises:
            ValueError: there is no such worker.
        """
        unknown = sorted({*(workers or ())} - {*self.shares})
        if unknown or isinstance(workers, str):
            raise ValueError(
                f"workers must be names of workers, in a list, got {brief(workers)}; there are "
                f"{', '.join(map(repr, self.shares))}"
            )
        return [worker for worker in self.shares if workers is None or worker in workers]

    def send_read(self, workers: Collection[str]) -> dict[str, "Future[Reading]"]:
        """Ask workers for their parameters."""
        return self._call("read", dict.fromkeys(workers, ()))

    def send_step(
        self, sources: Sources, groups: Groups, taken: Mapping[str, GradientVersions]
    ) -> Asked:
        """Send a step to all workers, once the totals that it needs are there.

        Args:
            sources: of gradients.
            groups: with their options as they are now.
            taken: of which version each worker's gradients are; empty where nobody asks.

        Raises:
            WorkerError: some gradients are too old; nothing was sent then.
        """
        if any(one.most is not None for one in taken.values()):
            # Of gradients that are given, the caller alone knows the age: they need not be sent.
            named = self.transport.has_contexts
            given = {
                worker: (sources[worker] if named else None, one) for worker, one in taken.items()
            }
            all_of("step", self._call("check", given))
        options = self._options.now(groups)
        if self._wants_order and not self.transport.keeps_order:
            wait([one for sent in self._sent.values() for one in sent])
        sources = self._apart(sources)
        totals = self._totals(sources, options)
        more = (totals,) if totals or taken else ()  # as little as can be
        content = {
            worker: (sources[worker], *more, *([taken[worker]] if taken else []))
            for worker in self.handles
        }
        asked = self._asked("step", options, content)
        for worker, future in asked.futures.items():
            left = [one for one in self._sent[worker] if not one.done()]
            self._waits[worker] += bool(left)
            self._sent[worker] = [*left, future]
        return asked

    def _apart(self, sources: Sources) -> Sources:
        """Return gradients with copies of those that are parameters: any worker may write first."""
        params = [one.like for group in self._groups for one in group.params]
        return {
            worker: apart_from(own, params) if isinstance(own, list) else own
            for worker, own in sources.items()
        }

    def answers(self, asked: Asked) -> dict[str, Any]:
        """Return the results of all workers, once all have answered.

        A worker that does not have the options of a version is sent them.

        Raises:
            WorkerError: some failed.
        """
        results, errors = settled(asked.futures)
        missing = [worker for worker, one in errors.items() if isinstance(one, MissingOptionsError)]
        if missing:
            full = {
                worker: _placed(asked.given[worker], asked.options[worker]) for worker in missing
            }
            found, wrong = settled(self._call(asked.method, full))
            results |= found
            errors = {worker: one for worker, one in errors.items() if worker not in full} | wrong
        for worker in results:
            self._options.acknowledge(worker, asked.options[worker])
        if errors:
            raise failed(asked.method, errors, len(asked.futures))
        return results

    def each(self, method: str, sources: Sources, value: float) -> dict[str, Any]:
        """Call a method with each worker's gradients, on the worker, and with a number."""
        given = {worker: (source, value) for worker, source in sources.items()}
        return all_of(method, self._call(method, given))

    def in_order(self, found: Mapping[str, Tensor]) -> list[Any]:
        """Return a number or row for each parameter, in the order of the groups."""
        made: list[list[Any]] = [[0.0] * len(group.params) for group in self._groups]
        for worker, shares in self.shares.items():
            numbers = iter(found[worker].tolist())
            for share in shares:
                for place in share.places:
                    made[share.number][place] = next(numbers)
        return [number for numbers in made for number in numbers]

    def state_dicts(self, groups: Groups, workers: Collection[str]) -> dict[str, Any]:
        """Return the state dicts of these workers."""
        options = self._options.now(groups)
        given = {worker: (options[worker],) for worker in workers}
        found: dict[str, Any] = all_of("state_dict", self._call("state_dict", given))
        return own_copy(found)  # type: ignore[no-any-return]  # what came may be in shared memory

    def load(self, parts: Mapping[str, Any]) -> None:
        """Load a state dict on each worker: on all, or on none.

        Raises:
            WorkerError: some cannot; the others are as they were before.
        """
        self._options.renew()
        futures = self._call("load_state_dict", {worker: (part,) for worker, part in parts.items()})
        loaded, errors = settled(futures)
        settling = {
            worker: self.transport.call(self.handles[worker], "settle", not errors)
            for worker in loaded
        }
        if errors:
            settled(settling)
            raise failed("load_state_dict", errors, len(futures))
        all_of("load_state_dict", settling)

    def counters(self, read_waits: int) -> dict[str, Counters]:
        """Return each worker's counters, and the snapshots that had to wait for all of them."""
        found: dict[str, Counters] = all_of("counters", self._call("counters"))
        return {
            worker: one._replace(waits=one.waits + self._waits[worker], read_waits=read_waits)
            for worker, one in found.items()
        }

    def close(self) -> None:
        """Let go of all workers; what was sent is done first where that can be."""
        self.handles = {}
        if self._close:
            self.transport.close()

    def _call(
        self, method: str, arguments: Mapping[str, tuple[Any, ...]] | None = None
    ) -> dict[str, Any]:
        """Call a method of those that have arguments, or of all, at once; a Future for each.

        Raises:
            RuntimeError: they were let go.
        """
        if not self.handles:
            raise RuntimeError(
                f"this optimizer is closed, so its workers cannot {method}: make another one, and "
                "load the state_dict() of before into it"
            )
        return {
            worker: self.transport.call(self.handles[worker], method, *own)
            for worker, own in (arguments or dict.fromkeys(self.handles, ())).items()
        }

    def _asked(
        self, method: str, options: dict[str, Numbered], given: dict[str, tuple[Any, ...]]
    ) -> Asked:
        """Call a method that takes options, with the version alone where that will do."""
        brief = self._options.brief
        sent = {
            worker: _placed(own, brief(worker, options[worker])) for worker, own in given.items()
        }
        return Asked(method, options, given, self._call(method, sent))

    def _totals(self, sources: Sources, options: dict[str, Numbered]) -> list[Tensor]:
        """The totals that stages need, summed in the order of the parameters."""
        totals: list[Tensor] = []
        for _ in range(self._measured_stages):
            given = {worker: (sources[worker], tuple(totals)) for worker in self.handles}
            found = self.in_order(self.answers(self._asked("measure", options, given)))
            totals.append(_total(found))
        return totals


def _total(found: Sequence[Any]) -> Tensor:
    """The sum of numbers; for rows, of each column."""
    if isinstance(found[0], list):
        return torch.stack([_total(column) for column in zip(*found, strict=True)])
    return sum_in_order(found)


def _placed(given: tuple[Any, ...], options: Any) -> tuple[Any, ...]:
    """Options after the source of gradients, before the rest."""
    return (given[0], options, *given[1:])


class Here:
    """Functions of gradients that are in this process, whoever owns their parameters."""

    _methods: Mapping[str, Callable[[Any, float], Any]] = {
        "addends": gradient_norms.addends,
        "scale_": gradient_norms.scale_,
        "unscale_": unscaled,
    }

    def each(self, method: str, sources: Sources, value: float) -> dict[str, Any]:
        """Call a function with each worker's gradients and a number."""
        function = self._methods[method]
        return {worker: function(source, value) for worker, source in sources.items()}
