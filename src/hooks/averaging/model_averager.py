"""Base class of averagers, which count steps and sometimes make ranks agree on parameters."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from functional_optim.engine.messages import format_value
from functional_optim.engine.tensors import is_dtensor
from hooks.averaging.rank_means import PendingMean, has_mean

RANGE = "functional_optim.average_parameters"
"""Name of averaging in traces of torch.profiler."""

Params = Iterable[Tensor] | Iterable[Mapping[str, Any]]


class ModelAverager(ABC):
    """Averager, which :class:`~hooks.PostLocalSGDOptimizer` calls after each of its steps.

    Args:
        process_group: of all ranks that average.
        warmup_steps: number of steps before the first possible averaging.

    Example::

        >>> class Never(ModelAverager):
        ...     def average_parameters(self, params, state=()):
        ...         self.step += 1
        ...     bytes_sent = 0
        >>> Never(None, 0).state_dict()
        {'step': 0}
    """

    def __init__(self, process_group: dist.ProcessGroup, warmup_steps: int) -> None:
        self.process_group = process_group
        """The group of all ranks that average."""
        self.warmup_steps = warmup_steps
        """Number of steps before the first possible averaging."""
        self.step = 0
        """Number of steps so far: calls of :meth:`average_parameters`."""

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """The bytes of tensors that this rank has sent, without headers."""

    def begin(self) -> None:  # noqa: B027  most averagers do not copy parameters
        """Read the parameters before the first step.

        :class:`~hooks.PostLocalSGDOptimizer` calls this before its first step. Without that
        optimizer, call it if parameters were written after the averager was created, such as by
        loading a model.
        """

    @abstractmethod
    def average_parameters(self, params: Params, state: Sequence[Tensor] = ()) -> None:
        """Count a step, and average if it is due.

        Args:
            params: parameters, or parameter groups of an optimizer; the same on all ranks.
            state: more tensors to average.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the step count, and everything that is kept between steps.

        ``torch.load`` loads it with ``weights_only=True``, its default.
        """
        return {"step": self.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict.

        Args:
            state_dict: of an averager of the same class and the same parameters.

        Raises:
            ValueError: the state dict does not fit; nothing is changed.
        """
        self.check(state_dict)
        self.step = int(state_dict["step"])

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Check that :meth:`load_state_dict` can load a state dict.

        Raises:
            ValueError: the state dict is of another averager.
        """
        self.check_has(state_dict, "step")

    def check_has(self, saved: Mapping[str, Any], *keys: str) -> None:
        """Check that a checkpoint, or a part of one, has these keys.

        Raises:
            ValueError: names the missing keys.
        """
        lacking = [key for key in keys if key not in saved]
        if lacking:
            kind = type(self).__name__
            raise ValueError(
                f"the checkpoint lacks {' and '.join(lacking)}, which {kind} needs: load "
                f"a checkpoint of {kind}. To start a new averager from loaded parameters, "
                "create it after loading them, and load only the inner optimizer"
            )


class InFlight(NamedTuple):
    """Mean in progress, to be applied after a later step."""

    due: int
    """The step after which the mean is applied."""
    sent: list[Tensor]
    """The parameters at the start; empty if the mean is applied at once."""
    mean: PendingMean

    def to_dict(self) -> dict[str, Any]:
        """Wait for the mean, and return all fields, for a checkpoint."""
        return {**self._asdict(), "mean": self.mean()}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "InFlight":
        """Load the fields of :meth:`to_dict`."""
        sent, views = ([one.clone() for one in saved[key]] for key in ("sent", "mean"))
        return cls(int(saved["due"]), sent, lambda: views)


def check_period(period: int, warmup_steps: int) -> None:
    if period < 1:
        raise ValueError(f"period must be a number of steps from 1 on, got {period}")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must be a number of steps from 0 on, got {warmup_steps}")


def refuse_state(state: Sequence[Tensor]) -> None:
    """Raise ValueError if an outer rule gets more tensors than the parameters."""
    if state:
        raise ValueError("an outer rule has no use for further tensors: leave out state")


def shard_coordinates(tensors: Sequence[Tensor]) -> list[Any] | None:
    """Return the shards of DTensors on this rank, to compare ranks; None without DTensors.

    Ranks with the same shard have the same coordinates in the mesh, except in the dimensions over
    which the tensor is replicated.
    """
    found: list[Any] = []
    for index, tensor in enumerate(tensors):
        if is_dtensor(tensor):
            pairs = zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=True)
            cuts = [(repr(one), at) for one, at in pairs if not one.is_replicate()]
            found.append((index, tuple(tensor.shape), cuts))
    return found or None


def params_in(params: Params) -> list[Tensor]:
    """Return the parameters, each once, without those of integers, which have no mean.

    Raises:
        NotImplementedError: neither parameters nor groups, as torch raises it.
    """
    found: dict[int, Tensor] = {}
    for one in params:
        if not isinstance(one, (Tensor, Mapping)):
            raise NotImplementedError(
                "average_parameters takes parameters or parameter groups, got an iterable with "
                f"{format_value(one)}"
            )
        for param in [one] if isinstance(one, Tensor) else one["params"]:
            if has_mean(param):
                found.setdefault(id(param), param)
    return list(found.values())
