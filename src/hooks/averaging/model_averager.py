"""Base class of averagers: it counts steps, and at some of them makes ranks agree on parameters."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from functional_optim.core.brief import brief
from functional_optim.core.dtensors import is_sharded
from hooks.averaging.rank_means import PendingMean, has_mean

RANGE = "functional_optim.average_parameters"
"""The name under which torch.profiler shows the averaging."""

Params = Iterable[Tensor] | Iterable[Mapping[str, Any]]


class ModelAverager(ABC):
    """Base of what :class:`~hooks.PostLocalSGDOptimizer` calls after each of its steps.

    Args:
        process_group: of all ranks that average.
        warmup_steps: how many steps come before the first after which anything may be averaged.

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
        """Of all ranks that average."""
        self.warmup_steps = warmup_steps
        """How many steps come before the first after which anything may be averaged."""
        self.step = 0
        """How many steps were made: calls of :meth:`average_parameters`."""

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """The bytes of tensors that this rank has sent, headers not counted."""

    def begin(self) -> None:  # noqa: B027  most keep nothing of the parameters
        """Take note of the parameters that the first step is made from.

        :class:`~hooks.PostLocalSGDOptimizer` calls it before that step. Whoever calls
        :meth:`average_parameters` without one calls it where parameters were written to after the
        averager was made, as by loading a model.
        """

    @abstractmethod
    def average_parameters(self, params: Params, state: Sequence[Tensor] = ()) -> None:
        """Account for a step, and average if it is due.

        Args:
            params: parameters, or parameter groups of an optimizer; the same on all ranks.
            state: further tensors to average with them.
        """

    def state_dict(self) -> dict[str, Any]:
        """The count of steps, and all that is kept from one step to the next.

        It loads under the defaults of ``torch.load``.
        """
        return {"step": self.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there.

        Args:
            state_dict: of an averager of the same kind and the same parameters.

        Raises:
            ValueError: of another; nothing is changed.
        """
        self.check(state_dict)
        self.step = int(state_dict["step"])

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Check that :meth:`load_state_dict` can load a state dict.

        Raises:
            ValueError: it is of another averager.
        """
        self.check_has(state_dict, "step")

    def check_has(self, saved: Mapping[str, Any], *keys: str) -> None:
        """Check that a checkpoint, or a part of it, has these keys.

        Raises:
            ValueError: names those that it lacks.
        """
        lacking = [key for key in keys if key not in saved]
        if lacking:
            kind = type(self).__name__
            raise ValueError(
                f"the checkpoint lacks {' and '.join(lacking)}, which {kind} goes on from: "
                "load that of such an averager; or, to begin anew with parameters that were "
                "loaded, make the averager after them, and load the optimizer within alone"
            )


class InFlight(NamedTuple):
    """A mean that was begun and is not applied yet."""

    due: int
    """After which step it is applied."""
    sent: list[Tensor]
    """What parameters were when it was begun; empty where it is applied at once."""
    mean: PendingMean

    def saved(self) -> dict[str, Any]:
        """For a checkpoint: the mean, once it is there, with what belongs to it."""
        return {**self._asdict(), "mean": self.mean.wait()}

    @classmethod
    def loaded(cls, saved: Mapping[str, Any]) -> "InFlight":
        """Load what :meth:`saved` wrote."""
        sent, views = ([one.clone() for one in saved[key]] for key in ("sent", "mean"))
        return cls(int(saved["due"]), sent, PendingMean(views))


def check_steps(period: int, warmup_steps: int) -> None:
    """Check that an outer rule knows when it is to step.

    Raises:
        ValueError: a period below 1, or a negative warm-up.
    """
    if period < 1:
        raise ValueError(f"period must be a number of steps from 1 on, got {period}")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must be a number of steps from 0 on, got {warmup_steps}")


def refuse_state(state: Sequence[Tensor]) -> None:
    """Check that an outer rule is given nothing but the parameters.

    Raises:
        ValueError: something is.
    """
    if state:
        raise ValueError("an outer rule has no use for further tensors: leave out state")


def shards_in(tensors: Sequence[Tensor]) -> list[Any] | None:
    """Return which shards of DTensors this rank holds, for ranks to compare; None without DTensors.

    Ranks that hold one shard are at one coordinate of their mesh, but for the dimensions over which
    the tensor is replicated.
    """
    found: list[Any] = []
    for place, tensor in enumerate(tensors):
        if is_sharded(tensor):
            pairs = zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=True)
            cuts = [(repr(one), at) for one, at in pairs if not one.is_replicate()]
            found.append((place, tuple(tensor.shape), cuts))
    return found or None


def params_in(params: Params) -> list[Tensor]:
    """The parameters meant, each once; those of whole numbers, which have no mean, are left out.

    Raises:
        NotImplementedError: neither parameters nor groups, as torch raises it.
    """
    found: dict[int, Tensor] = {}
    for one in params:
        if not isinstance(one, (Tensor, Mapping)):
            raise NotImplementedError(
                "average_parameters takes parameters or parameter groups, got an iterable with "
                f"{brief(one)}"
            )
        for param in [one] if isinstance(one, Tensor) else one["params"]:
            if has_mean(param):
                found.setdefault(id(param), param)
    return list(found.values())
