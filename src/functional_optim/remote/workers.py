"""All workers of one optimizer, called at once."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from functional_optim import gradient_norms
from functional_optim.brief import brief
from functional_optim.checks import check_grad
from functional_optim.local_optimizer import Foreign
from functional_optim.recipe import Recipe
from functional_optim.remote.counters import Counters
from functional_optim.remote.errors import all_of, failed, settled
from functional_optim.remote.placing import PlacedGroup, shares_of
from functional_optim.remote.snapshot import Reading
from functional_optim.remote.staleness import Taken
from functional_optim.remote.transport import Transport
from functional_optim.remote.worker import unscaled
from functional_optim.torch_checkpoint import own_copy

Sources = Mapping[str, Any]
"""For each worker, where its gradients are found."""

Options = Sequence[Mapping[str, Any]]
"""Of each group."""


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

    def first_options(self) -> list[dict[str, Any]]:
        """Of each group, with the defaults that its workers have for it."""
        made = [dict(group.options) for group in self._groups]
        for worker, shares in self.shares.items():
            # A class of the user's may keep fewer groups than it was given.
            for share, own in zip(shares, self._about[worker][1], strict=False):
                made[share.number] = {**own, **made[share.number]}
        return made

    def dealt(self, gradients: Sequence[Sequence[Tensor | None]]) -> Sources:
        """Each worker's part of gradients that stand group by group.

        Raises:
            TypeError, ValueError: one that does not fit a parameter of this process.
        """
        for group, own in zip(self._groups, gradients, strict=True):
            for one, grad in zip(group.params, own, strict=True):
                if grad is not None and isinstance(one.handle, Tensor):
                    check_grad(one.handle, grad, one.name)
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
        self, sources: Sources, options: Options, taken: Mapping[str, Taken]
    ) -> dict[str, "Future[None]"]:
        """Send a step to all workers, once the totals that it needs are there.

        Args:
            sources: of gradients.
            options: of each group, as they are now.
            taken: of which version each worker's gradients are.

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
        own = self._own(options)
        totals = self._totals(sources, own)
        futures = self._call(
            "step",
            {
                worker: (sources[worker], own[worker], totals, taken[worker])
                for worker in self.handles
            },
        )
        for worker, future in futures.items():
            left = [one for one in self._sent[worker] if not one.done()]
            self._waits[worker] += bool(left)
            self._sent[worker] = [*left, future]
        return futures

    def each(self, method: str, sources: Sources, value: float) -> dict[str, Any]:
        """What a method makes of each worker's gradients, where they are, and of a number."""
        given = {worker: (source, value) for worker, source in sources.items()}
        return all_of(method, self._call(method, given))

    def in_order(self, found: Mapping[str, Tensor]) -> list[float]:
        """One number for each parameter, in the order of the groups."""
        made = [[0.0] * len(group.params) for group in self._groups]
        for worker, shares in self.shares.items():
            numbers = iter(found[worker].tolist())
            for share in shares:
                for place in share.places:
                    made[share.number][place] = next(numbers)
        return [number for numbers in made for number in numbers]

    def state_dicts(self, options: Options, workers: Collection[str]) -> dict[str, Any]:
        """Of these workers."""
        own = self._own(options)
        given = {worker: (own[worker],) for worker in workers}
        found: dict[str, Any] = all_of("state_dict", self._call("state_dict", given))
        return own_copy(found)  # type: ignore[no-any-return]  # what came may be in shared memory

    def load(self, parts: Mapping[str, Any]) -> None:
        """Load a state dict on each worker: on all, or on none.

        Raises:
            WorkerError: some cannot; the others are as they were before.
        """
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

    def counters(self) -> dict[str, Counters]:
        """What was done on each worker."""
        found: dict[str, Counters] = all_of("counters", self._call("counters"))
        return {
            worker: one._replace(waits=one.waits + self._waits[worker])
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

    def _own(self, options: Options) -> dict[str, list[Mapping[str, Any]]]:
        """The options of each worker's groups."""
        return {
            worker: [options[share.number] for share in shares]
            for worker, shares in self.shares.items()
        }

    def _totals(self, sources: Sources, own: Mapping[str, Any]) -> list[Tensor]:
        """The totals that measured stages need, summed in the order of the parameters."""
        totals: list[Tensor] = []
        for _ in range(self._measured_stages):
            given = {
                worker: (sources[worker], own[worker], tuple(totals)) for worker in self.handles
            }
            found = self.in_order(all_of("measure", self._call("measure", given)))
            total = reduce(add, found, 0.0)  # one after the other, which sum() does not promise
            totals.append(torch.tensor(total, dtype=torch.float64, device="cpu"))
        return totals


class Here:
    """The same for gradients that are in this process, whoever owns their parameters."""

    _methods: Mapping[str, Callable[[Any, float], Any]] = {
        "addends": gradient_norms.addends,
        "scale_": gradient_norms.scale_,
        "unscale_": unscaled,
    }

    def each(self, method: str, sources: Sources, value: float) -> dict[str, Any]:
        """What a function makes of each worker's gradients and a number."""
        function = self._methods[method]
        return {worker: function(source, value) for worker, source in sources.items()}
