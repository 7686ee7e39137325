"""torch's PowerSGD hook with its state by parameter instead of by bucket, for checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from functional_optim.engine.calls import disable_compile
from functional_optim.engine.messages import format_value
from hooks.averaging.bucket_history import BucketHistory
from hooks.averaging.parameter_registry import HOOK_MEMORIES
from hooks.group_lifetime import keep_group_alive

Hook = Callable[[Any], Future[Tensor]]
"""Communication hook, without its state."""


class Matrix(NamedTuple):
    """Parameter of a bucket that is sent as a product of two matrices."""

    name: str
    rows: int
    columns: int
    rank: int


class PowerSGDMemory:
    """State of PowerSGD between backward passes, by parameter name.

    PowerSGD (Vogels, Karimireddy and Jaggi 2019, arXiv 1905.13727, algorithm 1) sends a gradient
    matrix ``M`` as ``P Q^T``. For each parameter it keeps ``M - P Q^T`` (the error, added to the
    next gradient) and ``Q`` (the start of the next power iteration). torch's state has them by
    the number of a DDP bucket, and DDP's first backward pass has other buckets than later passes.
    So a run that resumes from torch's state would add errors to the wrong parameters.

    This class splits them by parameter, and joins them for each bucket. The first backward passes
    of a resumed run reduce in the buckets of the stopped run
    (:class:`~hooks.averaging.bucket_history.BucketHistory`). Every sum, product and random number
    then equals that of a run without stop, **bit for bit**, if the stopped run had made two passes
    (three with ``static_graph``), after which DDP's buckets are final, and if its parameters have
    one dtype.

    With other buckets (such as another ``bucket_cap_mb``), errors and ``Q`` still belong to the
    right parameters. Then these may differ: the rounding of sums over more than two ranks, which
    depends on the position in a buffer; random numbers, one draw per bucket, without
    ``warm_start`` or before the first ``Q``; and the rounding of products that are batched over
    the matrices of a bucket.

    On the CPU, buckets are reduced one after another: torch's hook starts its second and third
    collective when the previous one ends, in an order that otherwise differs between ranks.

    Args:
        state: torch's. In the first ``start_powerSGD_iter`` passes, gradients are averaged without
            compression.
        module: the DDP module, or the wrapped module.
        at_first: the hook for those passes; by default the mean over the state's group. For
            post-local SGD with PowerSGD, the state's group has some ranks, and
            ``partial(post_localSGD_hook, post)`` with an equally long warm-up averages over all.

    Raises:
        TypeError: ``state`` is not a PowerSGDState, or ``module`` is not a module.

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
            raise TypeError(f"state must be torch's PowerSGDState, got {format_value(state)}")
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {format_value(module)}")
        # No reference to the DDP module: its reducer refers to the hook, and the hook to this.
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        self.state = state
        """torch's state, with the tensors of the latest buckets."""
        self._params = {name: one for name, one in inner.named_parameters() if one.requires_grad}
        self._names = {id(param): name for name, param in self._params.items()}
        self._at_first = at_first
        self._errors: dict[str, Tensor] = {}
        self._qs: dict[str, Tensor] | None = None
        self._in_torch: dict[int, list[str]] = {}
        self._history: BucketHistory[str] = BucketHistory()
        self._latest: Future[Tensor] | None = None
        HOOK_MEMORIES.add(self, self._params.values())

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Reduce a bucket, as :func:`power_sgd_hook`."""
        params = bucket.parameters()
        unknown = [tuple(param.shape) for param in params if id(param) not in self._names]
        if unknown:
            raise ValueError(
                f"a bucket has a parameter of shape {unknown[0]} that is none of the module's; "
                "make the memory from the module that DistributedDataParallel was given"
            )
        group: Any = self.state.process_group or dist.group.WORLD
        keep_group_alive(self, group)
        names = [self._names[id(param)] for param in params]
        return self._history.reduce(bucket, names, self._run_hook)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, between two backward passes.

        Returns:
            ``iteration``, ``rng``, ``totals`` and ``next_report`` are those of torch's state;
            ``buckets`` has the parameter names of each bucket; ``errors`` a tensor of the shape of
            each parameter, of this rank; ``qs`` a tensor of shape (columns, rank) for each matrix,
            the same on all ranks, or None before the first draw. ``torch.load`` loads it with
            ``weights_only=True``, its default.
        """
        for index in list(self._in_torch):
            self._store_bucket(index)
        rng: Any = self.state.rng
        _, words, position, *_ = rng.get_state()
        return {
            "iteration": self.state.iter,
            "rng": (torch.from_numpy(words.astype("int64")), int(position)),
            "totals": (
                self.state.total_numel_before_compression,
                self.state.total_numel_after_compression,
            ),
            "next_report": self.state.next_stats_report,
            "buckets": [list(names) for names in self._history.buckets],
            "errors": {
                n: one.view(self._params[n].shape).clone() for n, one in self._errors.items()
            },
            "qs": None if self._qs is None else {n: one.clone() for n, one in self._qs.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict.

        Args:
            state_dict: of a memory of the same parameters and the same rank of approximation. All
                except ``errors`` is equal on all ranks. With other ranks, replace ``errors`` by an
                empty dict; errors then start at zero.

        Raises:
            ValueError: the state dict does not fit; nothing is changed.
        """
        self.check(state_dict)
        state, (words, position) = self.state, state_dict["rng"]
        rng: Any = state.rng
        state.iter = int(state_dict["iteration"])
        rng.set_state(("MT19937", words.numpy().astype("uint32"), position))
        before, after = state_dict["totals"]
        state.total_numel_before_compression, state.total_numel_after_compression = before, after
        state.next_stats_report = state_dict["next_report"]
        for tensors in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            tensors.clear()
        self._in_torch = {}
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
        self._history.resume(state_dict["buckets"])

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Check that :meth:`load_state_dict` can load a state dict.

        Raises:
            ValueError: other parameters, or another rank of approximation.
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

    def _run_hook(self, bucket: Any) -> Future[Tensor]:
        """Run torch's hook, with the errors and ``Q`` of the parameters in this bucket."""
        state = self.state
        if state.iter < state.start_powerSGD_iter:
            if self._at_first is None:
                return powerSGD_hook(state, bucket)
            state.maybe_increase_iter(bucket)
            return self._at_first(bucket)
        on_cpu = bucket.buffer().device.type == "cpu"
        if self._latest is not None and on_cpu:
            self._latest.wait()
        names = [self._names[id(param)] for param in bucket.parameters()]
        if self._in_torch.get(bucket.index()) != names:
            for index, own in list(self._in_torch.items()):
                if index == bucket.index() or set(own) & set(names):
                    self._store_bucket(index)
            self._load_bucket(bucket.index(), names)
        self._latest = powerSGD_hook(state, bucket)
        if on_cpu and bucket.is_last():
            self._latest.wait()  # before collectives that DDP starts at the end of backward
        return self._latest

    def _store_bucket(self, index: int) -> None:
        """Move a bucket's errors and ``Q`` from torch's state to the parameters."""
        state, names = self.state, self._in_torch.pop(index)
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

    def _load_bucket(self, index: int, names: list[str]) -> None:
        """Move the parameters' errors and ``Q`` to torch's state, for a bucket."""
        state, like = self.state, self._params[names[0]].detach()
        self._in_torch[index] = names
        if self._errors.keys() >= set(names):
            state.error_dict[index] = torch.cat([self._errors.pop(name) for name in names])
        if self._qs is not None:
            found = self._matrices(names)
            flats = [self._qs.pop(one.name).reshape(-1) for one in found]
            state.q_memory_dict[index] = torch.cat([like.new_empty(0), *flats])
            # The hook writes P before it reads it.
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


@disable_compile
def power_sgd_hook(memory: PowerSGDMemory, bucket: dist.GradBucket) -> Future[Tensor]:
    """Reduce a bucket by torch's ``powerSGD_hook``, with state for checkpoints: a DDP hook.

    Args:
        memory: the state of ``register_comm_hook``.
        bucket: of gradients.

    Returns:
        A future of the bucket's buffer.

    Raises:
        ValueError: a bucket with a parameter that the memory's module does not have.

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
