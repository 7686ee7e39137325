"""Outer optimizer: its gradient is the mean change of the parameters over all ranks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from functional_optim import Optimizer, TorchOptimizer
from functional_optim.engine.calls import disable_compile
from functional_optim.engine.messages import format_value
from functional_optim.engine.stages import is_measured, refuse_closure, require_one_chain
from functional_optim.engine.tensors import can_step_shards, format_placements, is_dtensor, to_local
from hooks.averaging.compression import Compression
from hooks.averaging.compression.checks import ENCODABLE_DTYPES
from hooks.averaging.compression.error_feedback import with_error_feedback
from hooks.averaging.model_averager import (
    RANGE,
    InFlight,
    ModelAverager,
    Params,
    check_period,
    params_in,
    refuse_state,
    shard_coordinates,
)
from hooks.averaging.rank_means import RankMeans, checksum
from hooks.profiling import named_range
from sharding import ParameterSpec, ShardPlan, plan
from sharding.transport.groups import resolve_group


class OuterModelAverager(ModelAverager):
    """Steps an outer rule every ``period`` steps, with the ranks' mean change as its gradient.

    The *anchor* ``a`` is a copy of the parameters from when all ranks last agreed. With ``x_r`` the
    parameters of rank ``r`` after ``H`` local steps:

        d_r = a - x_r                        (the outer gradient)
        d   = (((C(d_0) + C(d_1)) + ...) / W
        a  <- outer(a, d)
        x_r <- a

    The outer rule is any optimizer: SGD with lr 1 is plain averaging, with momentum SlowMo (Wang
    et al. 2019, arXiv 1910.00643, algorithm 1), with Nesterov's momentum DiLoCo (Douillard et al.
    2023, arXiv 2311.08105, algorithm 1); docs/concepts/averaging.md lists published settings.
    ``C`` compresses; with error feedback, its error is added to the next change.

    **Streaming** (Douillard et al. 2025, arXiv 2501.18512): with ``fragments=F`` the parameters are
    divided into fragments of about the same size, which are averaged in turn, every ``H / F``
    steps. With ``delay=d`` a fragment's mean is computed in the background during ``d`` more
    steps, and is then applied as ``x_r <- m x_r + (1 - m) a`` with ``m`` the ``mixing``. Without
    ``mixing``, the changes of those steps are kept: ``x_r <- a + (x_r - x_r as sent)``.

    The first anchors are the parameters before the first step of a
    :class:`~hooks.PostLocalSGDOptimizer` (see :meth:`begin`), or those after the warm-up. Anchors
    of 16-bit parameters are float32. For a DTensor, as FSDP2 creates it, each rank has the anchor
    of its shard, and averages it with the same shard on the other ranks: the process group is that
    of the mesh dimension over which parameters are replicated. :meth:`state_dict` has outer state,
    anchors, residuals and means in flight, so a run that stops within a period resumes bit for bit.

    Args:
        params: parameters or parameter groups to average; equal on all ranks, as DDP makes them.
            Other parameters are not changed.
        outer: the outer rule.
        period: ``H``, the number of steps from one mean of a fragment to its next.
        warmup_steps: steps in which all ranks keep the same parameters (their gradients are
            averaged); the first period starts after them.
        process_group: of the ranks that average; a DeviceMesh of one dimension; None for the world.
        fragments: their number, or a :class:`~sharding.ShardPlan` over them that splits no
            parameter, with the parameters' indices as paths.
        delay: number of steps before a mean is applied; less than the period.
        mixing: the weight of a rank's own parameters when a delayed mean is applied.
        compression: encodes the changes, of float32 and 16-bit parameters; None to send them
            unchanged.
        error_feedback: True to send the compression's error later.

    Raises:
        TypeError: ``outer`` is not an Optimizer.
        ValueError: an outer rule that needs whole tensors, or totals over them, with DTensors; a
            period below 1; a delay or a number of fragments that the period is too short for; no
            parameters; a mixing without delay or out of [0, 1); a compression of parameters with
            another dtype.

    Example::

        >>> from functional_optim import sgd
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = nn.Linear(2, 1)
        >>> diloco = sgd(lr=0.7, momentum=0.9, nesterov=True)
        >>> averager = OuterModelAverager(model.parameters(), diloco, period=500)
        >>> averager.average_parameters(model.parameters())
        >>> averager.optimizer.param_groups[0]["lr"]
        0.7
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        outer: Optimizer,
        period: int,
        *,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        fragments: int | ShardPlan = 1,
        delay: int = 0,
        mixing: float | None = None,
        compression: Compression | None = None,
        error_feedback: bool = True,
    ) -> None:
        refuse_closure(outer, "OuterModelAverager")
        if not isinstance(outer, Optimizer):
            raise TypeError(
                f"outer must be an Optimizer, such as sgd(lr=0.7), got {format_value(outer)}"
            )
        require_one_chain(outer, "OuterModelAverager")  # fragments are stepped separately
        check_period(period, warmup_steps)
        _check_delay(period, delay, mixing)
        super().__init__(resolve_group(process_group), warmup_steps)
        self.period = period
        """The number of steps from one mean of a fragment to its next."""
        self.delay, self.mixing = delay, mixing
        self._full_params = params_in(params)
        _check_shards(outer, self._full_params)
        self._shards = shard_coordinates(self._full_params)
        self._fragments = _fragments_of(self._full_params, fragments, period)
        self._error_feedback = error_feedback
        self._anchors = [nn.Parameter(wide_copy(param)) for param in self._params]
        self.optimizer = TorchOptimizer(self._anchors, outer)
        """The outer rule over the anchors. Change its learning rate in its ``param_groups``."""
        self._means = RankMeans(self.process_group, background=delay > 0)
        self._compression = compression
        self._residuals: list[Tensor] = []
        if compression is not None:
            _check_float32(self._params)
            self._residuals = [self._zeros(one) for one in self._fragments]
        self._in_flight: dict[int, InFlight] = {}

    @property
    def _params(self) -> list[Tensor]:
        """The shards of DTensors, which ``module.to`` replaces, and all other parameters."""
        return list(map(to_local, self._full_params))

    @property
    def bytes_sent(self) -> int:
        """The bytes of tensors that this rank has sent, without headers."""
        return self._means.bytes_sent

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the current parameters to the anchors."""
        for anchor, one in zip(self._anchors, self._params, strict=True):
            anchor.copy_(one)

    @disable_compile
    @torch.no_grad()
    def average_parameters(self, params: Params = (), state: Sequence[Tensor] = ()) -> None:
        """Count a step; start and apply the means that are due.

        Args:
            params: ignored; the constructor got the parameters.
            state: must be empty.

        Raises:
            ValueError: ``state`` is not empty; ranks with different anchors.
            TransportError: names a missing rank.
        """
        refuse_state(state)
        if self.step == self.warmup_steps - 1:
            self.begin()
        with named_range(RANGE):
            for number in self._due():
                self._in_flight[number] = self._start(number)
            for number, found in list(self._in_flight.items()):
                if self.step >= found.due:
                    del self._in_flight[number]
                    self._apply(number, found)
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return outer state, anchors, residuals, means in flight, and the step count."""
        return {
            **super().state_dict(),
            "outer": self.optimizer.state_dict(),
            "anchors": [anchor.detach() for anchor in self._anchors],
            "residuals": self._residuals,
            "in_flight": {number: one.to_dict() for number, one in self._in_flight.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict.

        Args:
            state_dict: of an averager of the same parameters, fragments and compression. Everything
                except residuals is equal on all ranks with the same shards. So another number of
                ranks can load it if no mean is in flight: delete ``"residuals"``, which belong to
                one rank; they then start at zero.

        Raises:
            ValueError: the state dict does not fit; nothing is changed.
        """
        self.check(state_dict)
        residuals = state_dict.get("residuals", list(map(torch.zeros_like, self._residuals)))
        self.optimizer.load_state_dict(state_dict["outer"])
        super().load_state_dict(state_dict)
        for own, one in zip(self._anchors, state_dict["anchors"], strict=True):
            own.copy_(one)
        every = zip(self._residuals, residuals, strict=True)
        self._residuals = [torch.empty_like(own).copy_(one) for own, one in every]
        saved = state_dict["in_flight"].items()
        self._in_flight = {int(number): InFlight.from_dict(one) for number, one in saved}

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Check a state dict, except the outer rule's state, which ``load_state_dict`` checks."""
        super().check(state_dict)
        self.check_has(state_dict, "outer", "anchors", "in_flight")
        check_shapes("anchors", state_dict["anchors"], self._anchors)
        check_shapes("residuals", state_dict.get("residuals", self._residuals), self._residuals)
        params = self._params
        for number, saved in state_dict["in_flight"].items():
            self.check_has(saved, *InFlight._fields)
            indices = self._fragments[int(number)] if int(number) < len(self._fragments) else []
            own = [params[k] for k in indices]
            means = own if self._compression is None else [self._zeros(indices)]
            check_shapes(f"means in flight of fragment {number}", saved["mean"], means)
            if saved["sent"]:
                check_shapes(f"parameters sent of fragment {number}", saved["sent"], own)

    def _due(self) -> list[int]:
        """Return the fragments whose mean starts after this step."""
        made = self.step + 1 - self.warmup_steps
        count = len(self._fragments)
        turns = [(number + 1) * self.period // count for number in range(count)]
        return [k for k, turn in enumerate(turns) if made > 0 and (made - turn) % self.period == 0]

    def _start(self, number: int) -> InFlight:
        indices, params = self._fragments[number], self._params
        changes = [self._anchors[k] - params[k] for k in indices]
        sent = [params[k].detach().clone() for k in indices] if self.delay else []
        due = self.step + self.delay
        mark = [self._shards, *(checksum(self._anchors[k]) for k in indices)]
        if self._compression is None:
            return InFlight(due, sent, self._means.launch(changes, mark=mark))
        flat = torch.cat([one.reshape(-1).float() for one in changes])
        if self._error_feedback:
            payload, self._residuals[number] = with_error_feedback(
                self._compression, flat, self._residuals[number]
            )
        else:
            payload = self._compression.encode(flat)
        out = torch.empty_like(flat)
        mean = self._means.launch_decoded(self._compression, payload, out, mark=mark)
        return InFlight(due, sent, mean)

    def _apply(self, number: int, found: InFlight) -> None:
        indices, means = self._fragments[number], found.mean()
        if self._compression is not None:
            sizes = [self._anchors[k].numel() for k in indices]
            means = list(means[0].split(sizes))
        for k, mean in zip(indices, means, strict=True):
            self._anchors[k].grad = mean.view_as(self._anchors[k]).to(self._anchors[k].dtype)
        self.optimizer.step()
        self.optimizer.zero_grad()
        params = self._params
        for index, k in enumerate(indices):
            self._merge(params[k], self._anchors[k], found.sent[index : index + 1])
        # Autograd counts the versions of a DTensor and of its shard separately.
        sharded = [self._full_params[k] for k in indices if is_dtensor(self._full_params[k])]
        torch.autograd.graph.increment_version(sharded)

    def _merge(self, param: Tensor, anchor: Tensor, sent: Sequence[Tensor]) -> None:
        """Write the anchor to a parameter, keeping changes since the parameter was sent."""
        if not sent:
            param.copy_(anchor)
        elif self.mixing is None:
            param.copy_(anchor + (wide_copy(param) - sent[0]))
        else:
            param.copy_(self.mixing * wide_copy(param) + (1 - self.mixing) * anchor)

    def _zeros(self, indices: Sequence[int]) -> Tensor:
        """Return zeros for all elements of a fragment, where its compression needs them."""
        numel = sum(self._anchors[k].numel() for k in indices)
        return torch.zeros(numel, dtype=torch.float32, device=self._anchors[indices[0]].device)


def wide_copy(param: Tensor) -> Tensor:
    """Return a copy, in float32 if the dtype has fewer bits."""
    small = param.dtype in {torch.bfloat16, torch.float16}
    return param.detach().to(torch.float32 if small else param.dtype, copy=True)


def _fragments_of(
    params: Sequence[Tensor], wanted: int | ShardPlan, period: int
) -> list[list[int]]:
    """Return the indices of the parameters of each fragment.

    Raises:
        ValueError: no parameters; fewer than one fragment, more fragments than steps in the period
            or than parameters; a plan of other parameters, or one that splits a parameter.
    """
    if not params:
        raise ValueError("params has no parameters of floating numbers: nothing can be averaged")
    if isinstance(wanted, int):
        if not 1 <= wanted <= min(period, len(params)):
            raise ValueError(
                f"fragments must be from 1 to {min(period, len(params))}: each fragment needs a "
                f"step of the {period} steps of a period, and a parameter; got {wanted}"
            )
        specs = [ParameterSpec(str(k), tuple(param.shape)) for k, param in enumerate(params)]
        wanted = plan(specs, wanted, policy="greedy")
    shapes = [tuple(spec.shape) for spec in wanted.specs]
    if shapes != [tuple(param.shape) for param in params] or not wanted.is_whole:
        raise ValueError(
            "a plan of fragments must have the given parameters, in their order, and must not cut "
            "any; create it by plan(specs, fragments, policy='greedy'), one spec per parameter"
        )
    found = [[one.parameter for one in wanted.owned(k)] for k in range(wanted.world_size)]
    if not all(found):
        raise ValueError(f"fragment {found.index([])} of {len(found)} has no parameter")
    if len(found) > period:
        raise ValueError(
            f"{len(found)} fragments are too many for a period of {period} steps; use at most "
            f"{period} fragments, or a longer period"
        )
    return found


def _check_shards(outer: Optimizer, params: Sequence[Tensor]) -> None:
    """Raise ValueError if an outer rule steps shards of DTensors other than whole tensors."""
    for index, param in enumerate(params):
        if is_dtensor(param):
            for stage in outer.stages:
                if is_measured(stage) or not can_step_shards([stage]):
                    raise ValueError(
                        f"params[{index}] is a DTensor ({format_placements(param)}), of which this "
                        f"rank holds a part, and {stage.name}, of the outer rule, needs more than "
                        "a part: take an outer rule that works element by element, such as sgd"
                    )


def _check_delay(period: int, delay: int, mixing: float | None) -> None:
    if not 0 <= delay < period:
        raise ValueError(
            f"delay must be a number of steps from 0 to {period - 1}, as a fragment's next mean is "
            f"begun after {period} steps, got {delay}"
        )
    if mixing is not None and (not delay or not 0 <= mixing < 1):
        raise ValueError(
            f"mixing must be a share from 0 on and below 1, with a delay above 0, got {mixing} "
            f"with delay {delay}"
        )


def _check_float32(params: Sequence[Tensor]) -> None:
    for index, param in enumerate(params):
        if param.dtype not in ENCODABLE_DTYPES:
            raise ValueError(
                f"parameter {index} is of {param.dtype}, and a compression sends the digits of "
                "float32; leave compression out, or the parameter"
            )


def check_shapes(what: str, found: Sequence[Tensor], own: Sequence[Tensor]) -> None:
    """Raise ValueError if tensors of a checkpoint have other shapes than the tensors here."""
    shapes, wanted = ([tuple(one.shape) for one in tensors] for tensors in (found, own))
    if shapes != wanted:
        raise ValueError(
            f"the checkpoint's {what} have shapes {shapes}, those here have {wanted}; load into an "
            "averager with the same parameters, fragments and compression"
        )
