"""Steps after a bucket's communication: step what this rank owns, make parameters whole."""

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from functional_optim._torch import current_graph_task_id, is_joining
from functional_optim.core.compiling import uncompiled
from hooks.arrivals import reduced_by
from hooks.driver import BucketDriver
from hooks.ranges import named_range
from hooks.usage import UsedFlags, may_leave_unused
from hooks.zero.bucket import Gradients, KnownBuckets, ZeroBucket
from hooks.zero.checks import sharded_paths
from hooks.zero.clipping import Clipping
from hooks.zero.roll_call import RollCall
from hooks.zero.totals import squares, total
from sharding import ZeroRedundancyOptimizer
from sharding.transport import Transport
from sharding.zero.gather import GatherWork
from sharding.zero.groups import in_order

logger = logging.getLogger(__name__)

RANGE = "functional_optim.zero_step"
"""The name under which torch.profiler shows the steps of a bucket."""


class OverlapOptions(NamedTuple):
    """Options of the caller."""

    hold: bool = False
    """Step all buckets when the last one is communicated, not each as it comes."""
    max_norm: float | None = None
    """Scale all gradients down together where their norm exceeds this."""
    skip_nonfinite: bool = False
    """Step nothing, on any rank, in an iteration with a gradient that is not finite."""
    grad_scaler: torch.amp.GradScaler | None = None
    """What the loss was scaled by."""
    into_forward: bool = False
    """Let gathers run on after backward."""


class _Arrived(NamedTuple):
    """A bucket whose gradients are reduced."""

    bucket: ZeroBucket
    owned: Gradients
    """Of them, those that this rank is to step by."""


class _Gathering(NamedTuple):
    """Parameters on their way."""

    params: tuple[Tensor, ...]
    """Which are not to be touched before they are whole."""
    work: GatherWork


class Overlap:
    """The memory of a hook from bucket to bucket.

    Args:
        ddp: the module whose hook this is for.
        zero: the optimizer.
        gathers: a transport over a group of its own, so that the order of gathers and that of
            reductions do not depend on one another.
        options: as above.
        all_of_ddp: whether ``zero`` must have every parameter that DDP reduces.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        zero: ZeroRedundancyOptimizer,
        gathers: Transport,
        options: OverlapOptions,
        *,
        all_of_ddp: bool,
    ) -> None:
        # Not the module itself: its reducer holds the hook, and the ring would never be freed.
        self._ddp = weakref.ref(ddp)
        self._zero = zero
        self._all_of_ddp = all_of_ddp
        self._gathers = gathers
        self._device = gathers_on(zero)
        self._options = options
        self.clipping = Clipping(
            zero, options.max_norm, options.skip_nonfinite, options.grad_scaler
        )
        self._measured, self._at_once = zero.measured_stages, zero.steps_at_once
        waits = self.clipping.is_needed or self._measured > 0 or self._at_once
        self._hold = options.hold or waits
        reduced = reduced_by(ddp)
        self.driver = BucketDriver(
            ddp.process_group, reduced.values(), reduced, may_leave_unused=may_leave_unused(ddp)
        )
        self._find_paths(ddp)
        # What was frozen by now has no hook that would notice its use.
        self._frozen = [path for path, param in zero.params.items() if not param.requires_grad]
        self.roll_call = RollCall(ddp.process_group, self._device)
        self._entered: list[Tensor] = []
        self._waiting: list[_Arrived] = []
        self._addends: list[Tensor] = []
        self._pending: dict[int, _Gathering] = {}
        self.handles = self.driver.handles
        """Of hooks on parameters and modules, which are to live no longer than this."""
        # The module may be wrapped again, with other optimizers, for as long as it lives.
        weakref.finalize(self, _let_go, self._pending, self.handles).atexit = False

    # -------------------------------------------------------------------------- in DDP's thread

    def enter(self, bucket: dist.GradBucket) -> tuple[ZeroBucket, UsedFlags | None]:
        """Account for a bucket, and ask which of its parameters count.

        Called before anything of the bucket is communicated: the question is a collective too.

        Raises:
            RuntimeError: a parameter that came twice in this iteration or not at all in the last.
        """
        place = self.driver.place_of(bucket)
        if place.number == 0:
            self._wait_for_gathers()
            self._waiting, self._addends, self._entered = [], [], []
            ddp = self._ddp()
            if ddp is not None and self._buckets.plan is not self._zero.plan:
                self._find_paths(ddp)
            self._check_frozen()
        entered = self._buckets.of(bucket, place)
        try:
            self.driver.enter(place, entered.paths)
        except RuntimeError:
            with suppress(RuntimeError):  # it says the same, of this rank's part only
                self._zero.end_iteration()
            raise
        if entered.number == 0:
            self._zero.begin_iteration()
        if not entered.members:
            return entered, None
        with self.roll_call.on_failure(f"the communication of bucket {entered.number}"):
            return entered, self.driver.ask(entered.params, entered.buffer.device)

    def _find_paths(self, ddp: DistributedDataParallel) -> None:
        """Find the parameters to step, by their identity; there may be more of them than before."""
        paths = sharded_paths(ddp, self._zero, all_of_ddp=self._all_of_ddp)
        self._buckets = KnownBuckets(self._zero.plan, paths, self._gathers.size)
        self.driver.expect(paths.values())

    def _check_frozen(self) -> None:
        for path in self._frozen:
            if self._zero.params[path].requires_grad:
                raise RuntimeError(
                    f"the parameter {path!r} required no gradient when the hook was made, and does "
                    "now; it would never be stepped: call requires_grad_(True) before DDP and the "
                    "hook are made"
                )

    def after(
        self,
        bucket: ZeroBucket,
        used: UsedFlags | None,
        communicated: Callable[[], object],
        *,
        ready: bool = True,
    ) -> Future[Tensor]:
        """The future that the hook returns.

        Args:
            bucket: as entered.
            used: the answer to come.
            communicated: returns when this rank's gradients are reduced, in the bucket.
            ready: whether, on an accelerator, it does so without waiting on the host.
        """
        joining = self._joining()
        without_data = joining and current_graph_task_id() < 0
        self._mark_changed(bucket)
        return self.driver.follow(
            bucket.number,
            lambda: self._follow(bucket, used, communicated, joining, without_data),
            bucket.buffer.device,
            ready=ready,
        )

    def _mark_changed(self, bucket: ZeroBucket) -> None:
        """A backward pass that still needs a parameter must notice that it changes.

        It changes later, in another thread. Whatever read it before now, has read it.
        """
        self._entered += bucket.params
        if bucket.last or not self._hold:
            torch.autograd.graph.increment_version(self._entered)
            self._entered = []

    def wait(self) -> None:
        """Return when all parameters are whole.

        What a backward pass that failed has left under way has then ended, too.
        """
        self.driver.queue.wait()
        self._wait_for_gathers()

    def _wait_for_gathers(self) -> None:
        _wait_for(self._pending)
        self._pending.clear()

    def wait_for(self, params: Iterable[Tensor]) -> None:
        """Return when these parameters are whole."""
        if self._pending:
            for param in params:
                gathering = self._pending.get(id(param))
                if gathering is not None:
                    gathering.work.wait()
                    for done in gathering.params:
                        self._pending.pop(id(done), None)

    def _joining(self) -> bool:
        """Return True if ranks may run out of data.

        The context manager for that reads parameters at its end, where no hook sees it.
        """
        ddp = self._ddp()
        return ddp is not None and is_joining(ddp)

    # ------------------------------------------------------------------------ in the queue's thread

    def _follow(
        self,
        bucket: ZeroBucket,
        used: UsedFlags | None,
        communicated: Callable[[], object],
        joining: bool,
        without_data: bool,
    ) -> Tensor:
        unused = self._received(bucket, used, communicated)
        self._arrived(bucket, unused)
        if bucket.last:
            if self._hold:
                self._commit(without_data)
            self._zero.end_iteration()
            if joining or not self._options.into_forward:
                self._wait_for_gathers()
        return bucket.buffer

    def _received(
        self,
        bucket: ZeroBucket,
        used: UsedFlags | None,
        communicated: Callable[[], object],
    ) -> frozenset[str]:
        """Wait for what other ranks send; the paths that nobody used.

        Raises:
            RuntimeError: says which ranks are missing, also where the failed collective did not.
        """
        with self.roll_call.on_failure(f"the communication of bucket {bucket.number}"):
            communicated()
            if used is None:
                return frozenset()
            counts = used.wait()
        return frozenset(
            path for path, counted in zip(bucket.paths, counts, strict=True) if not counted
        )

    def _arrived(self, bucket: ZeroBucket, unused: frozenset[str]) -> None:
        if unused:
            self._zero.skip(unused)
        plan = self._zero.plan
        owned = bucket.owned(plan.shard_rank(self._gathers.rank), unused)
        if not self._hold:
            self._step(owned, (), [bucket])
            return
        self._waiting.append(_Arrived(bucket, owned))
        if self.clipping.is_needed:
            self._addends.append(squares(owned, plan))
        elif self._measured and not self._at_once:
            self._addends.append(self._zero.measure(owned))

    def _commit(self, without_data: bool) -> None:
        """All buckets are there: step them, or none of them."""
        waiting, self._waiting = self._waiting, []
        if self.clipping.is_needed and not self._clipped(waiting, without_data=without_data):
            return
        steps = [(one.owned, [one.bucket]) for one in waiting]
        if self._at_once:
            steps = [(_joined(one.owned for one in waiting), [one.bucket for one in waiting])]
        measured: list[Tensor] = []
        for _ in range(self._measured):
            if not self._addends:
                self._addends = [self._zero.measure(one, measured=measured) for one, _ in steps]
            measured.append(self._total(self._zero.summed))
        for owned, buckets in steps:
            self._step(owned, measured, buckets)

    def _clipped(self, waiting: Sequence[_Arrived], *, without_data: bool) -> bool:
        """Unscale and clip gradients as asked for; whether they are to be stepped by."""
        squares = self._total(in_order).item()
        gradients = [gradient for one in waiting for gradient in one.bucket.gradients]
        if self.clipping.apply(gradients, squares, without_data=without_data):
            return True
        self._zero.skip([path for one in waiting for path in one.bucket.paths])
        return False

    @uncompiled
    def _step(
        self, owned: Gradients, measured: Iterable[Tensor], buckets: Iterable[ZeroBucket]
    ) -> None:
        """Step by gradients, and send what was stepped of these buckets to the other ranks."""
        if owned or self._at_once:
            with named_range(RANGE):
                self._zero.step_owned(owned, measured=tuple(measured))
        for bucket in buckets:
            if bucket.members:
                work = self._zero.gather_over(self._gathers, bucket.paths)
                self._pending.update(
                    dict.fromkeys(map(id, bucket.params), _Gathering(bucket.params, work))
                )

    def _total(self, summed: Callable[[Tensor], Tensor]) -> Tensor:
        addends, self._addends = self._addends, []
        return total(addends, self._zero.plan, self._gathers, self._device, summed)


def _joined(parts: Iterable[Gradients]) -> Gradients:
    """The gradients of all buckets together."""
    found: Gradients = {}
    for one in parts:
        for path, ranges in one.items():
            found.setdefault(path, []).extend(ranges)
    return found


def _let_go(pending: dict[int, _Gathering], handles: list[RemovableHandle]) -> None:
    """Nothing is left on parameters and modules, and nothing on its way to them."""
    for handle in handles:
        handle.remove()
    for work in _works(pending):
        try:
            work.wait()
        except Exception:  # raised here it would reach no caller
            logger.exception(
                "parameters that were on their way when their hook was let go did not arrive on "
                "this rank: load a checkpoint; or call wait() before letting go of a hook"
            )


def _wait_for(pending: dict[int, _Gathering]) -> None:
    for work in _works(pending):
        work.wait()


def _works(pending: dict[int, _Gathering]) -> list[GatherWork]:
    """Each once, of however many parameters."""
    return list({id(one.work): one.work for one in list(pending.values())}.values())


def gathers_on(zero: ZeroRedundancyOptimizer) -> torch.device:
    """The device of all parameters that are stepped."""
    return next(param.device for param in zero.params.values() if param.requires_grad)
