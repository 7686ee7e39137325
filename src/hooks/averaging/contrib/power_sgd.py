"""torch's PowerSGD hook with a memory that checkpoints can hold: by parameter, not by bucket."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from functional_optim.core.brief import brief
from functional_optim.core.compiling import uncompiled
from hooks.averaging.by_parameter import MEMORIES
from hooks.averaging.reduced_buckets import ReducedBuckets
from hooks.group_lifetime import outlive

Hook = Callable[[Any], Future[Tensor]]
"""A communication hook, without its state."""


class Matrix(NamedTuple):
    """A parameter of a bucket that is sent as a product of two matrices."""

    name: str
    rows: int
    columns: int
    rank: int


class PowerSGDMemory:
    """Memory of PowerSGD between backward passes, by the names of parameters.

    PowerSGD (Vogels, Karimireddy and Jaggi 2019, arXiv 1905.13727, algorithm 1) sends a gradient
    matrix ``M`` as ``P Q^T`` and keeps, of each parameter, ``M - P Q^T`` (the error, added to the
    next gradient) and ``Q`` (where the next power iteration begins). torch's state has them by the
    number of a DDP bucket, and DDP's first backward pass has other buckets than all that follow:
    a run that goes on from such a state would add the errors of some parameters to others.

    Here they are cut by the bucket into parameters, and joined for whatever bucket comes. In its
    first backward pass a resumed run is reduced in the buckets of the run that was stopped
    (:class:`~hooks.averaging.reduced_buckets.ReducedBuckets`). Every sum, product and random number
    is then that of a run that never stopped, **bit for bit**, if that run had made two passes,
    after which DDP's buckets are final, and its parameters are of one dtype.

    With other buckets (another ``bucket_cap_mb``, say), errors and ``Q`` still go to their
    parameters. What may then differ is the rounding of sums over more than two ranks, whose order
    depends on the place in a buffer; random numbers, one draw for each bucket, where
    ``warm_start`` is off or there is no ``Q`` yet; and the rounding of products that are batched
    over the matrices of a bucket.

    Where tensors are reduced on the CPU, one bucket is reduced after the other: torch's hook
    launches its second and third collective when the one before is done, which otherwise is in
    another order on every rank.

    Args:
        state: torch's. In the first ``start_powerSGD_iter`` passes, gradients are averaged as they
            are.
        module: the DDP module, or the module within.
        at_first: what averages them in those passes; by default their mean is over the state's
            group. ``partial(post_localSGD_hook, post)`` with a warm-up as long makes it the mean
            over all ranks, where the state's group is of some: post-local SGD with PowerSGD.

    Raises:
        TypeError: no PowerSGDState, or no module.

    Example::

        >>> from hooks.averaging.contrib import power_sgd_hook
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ddp = DistributedDataParallel(nn.Linear(8, 8))
        >>> state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        >>> memory = PowerSGDMemory(state, ddp)
        >>> ddp.register_comm_hook(memory, power_sgd_hook)
        >>> for _ in range(4):
        ...     ddp(torch.ones(1, 8)).sum().backward()
        >>> saved = memory.state_dict()
        >>> saved["iteration"], sorted(saved["errors"]), sorted(saved["qs"])
        (4, ['bias', 'weight'], ['weight'])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self, state: PowerSGDState, module: nn.Module, *, at_first: Hook | None = None
    ) -> None:
        if not isinstance(state, PowerSGDState):
            raise TypeError(f"state must be torch's PowerSGDState, got {brief(state)}")
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {brief(module)}")
        # Not the DDP module: its reducer holds the hook, and the hook holds this.
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        self.state = state
        """torch's, whose tensors are those of the buckets that came last."""
        self._params = {name: one for name, one in inner.named_parameters() if one.requires_grad}
        self._names = {id(param): name for name, param in self._params.items()}
        self._at_first = at_first
        self._errors: dict[str, Tensor] = {}
        self._qs: dict[str, Tensor] | None = None
        self._held: dict[int, list[str]] = {}
        self._buckets: ReducedBuckets[str] = ReducedBuckets()
        self._latest: Future[Tensor] | None = None
        MEMORIES.add(self, self._params.values())

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """As :func:`power_sgd_hook`."""
        params = bucket.parameters()
        unknown = [tuple(param.shape) for param in params if id(param) not in self._names]
        if unknown:
            raise ValueError(
                f"a bucket has a parameter of shape {unknown[0]} that is none of the module's; "
                "make the memory from the module that DistributedDataParallel was given"
            )
        group: Any = self.state.process_group or dist.group.WORLD
        outlive(self, group)
        names = [self._names[id(param)] for param in params]
        return self._buckets.reduce(bucket, names, self._hooked)

    def state_dict(self) -> dict[str, Any]:
        """All of it; between two backward passes.

        Returns:
            ``iteration``, ``rng``, ``totals`` and ``next_report`` are those of torch's state;
            ``buckets`` names the parameters of each; ``errors`` has a tensor of the shape of each
            parameter, of this rank; ``qs`` one of shape (columns, rank) for each matrix, the same
            on all ranks, or is None where none has been drawn. It loads under the defaults of
            ``torch.load``.
        """
        for index in list(self._held):
            self._keep(index)
        chance: Any = self.state.rng
        _, words, place, *_ = chance.get_state()
        return {
            "iteration": self.state.iter,
            "rng": (torch.from_numpy(words.astype("int64")), int(place)),
            "totals": (
                self.state.total_numel_before_compression,
                self.state.total_numel_after_compression,
            ),
            "next_report": self.state.next_stats_report,
            "buckets": [list(names) for names in self._buckets.buckets],
            "errors": {
                n: one.view(self._params[n].shape).clone() for n, one in self._errors.items()
            },
            "qs": None if self._qs is None else {n: one.clone() for n, one in self._qs.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there.

        Args:
            state_dict: of a memory of the same parameters and the same rank of approximation. All
                but ``errors`` is the same on all ranks: where there are others now, make it an
                empty dict, and errors begin at zero.

        Raises:
            ValueError: of others; nothing is changed.
        """
        self.check(state_dict)
        state, (words, place) = self.state, state_dict["rng"]
        chance: Any = state.rng
        state.iter = int(state_dict["iteration"])
        chance.set_state(("MT19937", words.numpy().astype("uint32"), place))
        before, after = state_dict["totals"]
        state.total_numel_before_compression, state.total_numel_after_compression = before, after
        state.next_stats_report = state_dict["next_report"]
        for tensors in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            tensors.clear()
        self._held = {}
        self._errors = {
            name: one.reshape(-1).to(self._params[name], copy=True)
            for name, one in state_dict["errors"].items()
        }
        qs = state_dict["qs"]
        self._qs = (
            None
            if qs is None
            else {name: one.to(self._params[name], copy=True) for name, one in qs.items()}
        )
        self._buckets.resume(state_dict["buckets"])

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Check that this state may be loaded.

        Raises:
            ValueError: it is of other parameters, or of another rank of approximation.
        """
        errors, qs = state_dict["errors"], state_dict["qs"]
        own = {name: tuple(one.shape) for name, one in self._params.items()}
        matrices = {one.name: (one.columns, one.rank) for one in self._matrices(list(self._params))}
        for what, found, wanted in (("errors", errors or None, own), ("qs", qs, matrices)):
            shapes = None if found is None else {k: tuple(one.shape) for k, one in found.items()}
            if shapes is not None and shapes != wanted:
                raise ValueError(
                    f"the checkpoint's {what} of PowerSGD have shapes {shapes}, here they have "
                    f"{wanted}; load into a memory of the same parameters, with the same "
                    "matrix_approximation_rank and min_compression_rate"
                )

    def _hooked(self, bucket: Any) -> Future[Tensor]:
        """Torch's hook, with what belongs to the parameters of this bucket."""
        state = self.state
        if state.iter < state.start_powerSGD_iter:
            if self._at_first is None:
                return powerSGD_hook(state, bucket)
            state.maybe_increase_iter(bucket)
            return self._at_first(bucket)
        if self._latest is not None and bucket.buffer().device.type == "cpu":
            self._latest.wait()
        names = [self._names[id(param)] for param in bucket.parameters()]
        if self._held.get(bucket.index()) != names:
            for index, own in list(self._held.items()):
                if index == bucket.index() or set(own) & set(names):
                    self._keep(index)
            self._hold(bucket.index(), names)
        self._latest = powerSGD_hook(state, bucket)
        return self._latest

    def _keep(self, index: int) -> None:
        """Take what torch's state has of a bucket, by parameter."""
        state, names = self.state, self._held.pop(index)
        if index in state.error_dict:
            sizes = [self._params[name].numel() for name in names]
            slices = state.error_dict.pop(index).split(sizes)
            self._errors.update(zip(names, slices, strict=True))
        if index in state.q_memory_dict:
            found = self._matrices(names)
            state.p_memory_dict.pop(index)
            slices = state.q_memory_dict.pop(index).split([one.columns * one.rank for one in found])
            self._qs = self._qs or {}
            for one, flat in zip(found, slices, strict=True):
                self._qs[one.name] = flat.view(one.columns, one.rank)

    def _hold(self, index: int, names: list[str]) -> None:
        """Give it to torch's state, for a bucket."""
        state, like = self.state, self._params[names[0]].detach()
        self._held[index] = names
        if self._errors.keys() >= set(names):
            state.error_dict[index] = torch.cat([self._errors.pop(name) for name in names])
        if self._qs is not None:
            found = self._matrices(names)
            flats = [self._qs.pop(one.name).reshape(-1) for one in found]
            state.q_memory_dict[index] = torch.cat([like.new_empty(0), *flats])
            # Written before it is read.
            state.p_memory_dict[index] = like.new_zeros(sum(one.rows * one.rank for one in found))

    def _matrices(self, names: Sequence[str]) -> list[Matrix]:
        """Return the matrices of a bucket of these parameters, in the order of torch's state."""
        state = self.state
        by_shape: dict[tuple[int, int], list[Matrix]] = {}
        for name in names:
            param = self._params[name]
            if not param.numel():
                continue
            rows, columns = len(param), param.numel() // len(param)
            rank = min(rows, columns, state.matrix_approximation_rank)
            if (rows + columns) * rank * state.min_compression_rate < rows * columns:
                own = by_shape.setdefault((rows, columns), [])
                own.append(Matrix(name, rows, columns, rank))
        return [one for same in by_shape.values() for one in same]


@uncompiled
def power_sgd_hook(memory: PowerSGDMemory, bucket: dist.GradBucket) -> Future[Tensor]:
    """A DDP communication hook: torch's ``powerSGD_hook``, with a memory that checkpoints can hold.

    Args:
        memory: made by the caller, and given to ``register_comm_hook``.
        bucket: of gradients.

    Returns:
        A future of the bucket's buffer.

    Raises:
        ValueError: a bucket with a parameter that is none of the memory's module.

    Example::

        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ddp = DistributedDataParallel(nn.Linear(8, 8))
        >>> memory = PowerSGDMemory(PowerSGDState(None, start_powerSGD_iter=2), ddp)
        >>> ddp.register_comm_hook(memory, power_sgd_hook)
        >>> ddp(torch.ones(1, 8)).sum().backward()
        >>> memory.state.iter
        1
        >>> dist.destroy_process_group()
    """
    return memory.reduce(bucket)
