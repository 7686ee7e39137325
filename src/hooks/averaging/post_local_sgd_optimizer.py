"""PostLocalSGDOptimizer: a local step on every rank, and sometimes a mean over ranks."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.modules import with_own_step_hooks
from functional_optim.engine.calls import disable_compile, is_called_by
from functional_optim.engine.gradients import Scaling
from functional_optim.engine.messages import format_value
from hooks.averaging.model_averager import ModelAverager, params_in
from hooks.averaging.parameter_registry import HOOK_MEMORIES
from hooks.averaging.post_local_sgd_hook import HOOK_STATES, load_hooks, save_hooks
from hooks.averaging.rank_means import has_mean

STEP, AVERAGING = "step", "averaging"
"""Keys that are added to an optimizer's checkpoint: torch's, and one for everything else."""
POWER_SGD = "power_sgd"
"""Key of PowerSGD's state, under ``AVERAGING``."""
STATE_HELPERS = "torch.distributed.checkpoint.state_dict"
"""Module of torch that steps an optimizer without state, so that a state dict has all entries."""


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """Steps any optimizer by this rank's gradients, and averages parameters by an averager.

    With ``x`` the parameters of a rank, a step is ``x <- optim(x, g)``, then, if the averager's
    schedule is due, ``x <- mean over ranks of x`` (Lin et al. 2018, arXiv 1808.07217, algorithm 1).
    One call of :meth:`step` is one step, for any number of parameter groups. With
    :func:`~hooks.post_localSGD_hook` on the DDP module, hook and averager must have the same
    warm-up; otherwise the first step raises an error. This optimizer saves and loads the hook's
    count, the buckets in which the hook averaged, and the
    :class:`~hooks.averaging.contrib.PowerSGDMemory` of its parameters. Save :meth:`state_dict`
    itself: ``get_optimizer_state_dict`` of torch returns parameter groups and state only, without
    the averager's steps.

    Under a GradScaler, a rank with gradients that are not finite skips its local step and still
    averages, so that no rank waits for another.

    Args:
        optim: any ``torch.optim.Optimizer``; provides parameter groups and state.
        averager: a :class:`~hooks.ModelAverager`, or any object with ``step`` and
            ``average_parameters(param_groups)``.
        average_state: True to average the optimizer's state too: all floating tensors with the
            shape of their parameter, except step counts.
        buffers: tensors to average with the parameters, such as a module's running means; integer
            tensors are not changed.

    Raises:
        TypeError: ``optim`` is not an optimizer, or ``averager`` not an averager; ``average_state``
            or buffers with an averager that is not a ModelAverager.

    Example::

        >>> import torch.distributed as dist
        >>> from hooks import PeriodicModelAverager
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = PostLocalSGDOptimizer(
        ...     torch.optim.SGD(model.parameters(), lr=0.1), PeriodicModelAverager(4, 100))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state_dict()["step"]
        1
        >>> dist.destroy_process_group()
    """

    # A GradScaler then calls step() also for gradients that are not finite, and reports them.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        averager: Any,
        *,
        average_state: bool = False,
        buffers: tuple[Tensor, ...] | list[Tensor] = (),
    ) -> None:
        if not isinstance(optim, torch.optim.Optimizer):
            raise TypeError(f"optim must be a torch.optim.Optimizer, got {format_value(optim)}")
        if not callable(getattr(averager, "average_parameters", None)):
            raise TypeError(
                "averager must have average_parameters(param_groups), as PeriodicModelAverager "
                f"has, got {format_value(averager)}"
            )
        if (average_state or buffers) and not isinstance(averager, ModelAverager):
            raise TypeError(
                "average_state and buffers need a ModelAverager of this package, which averages "
                f"them with the parameters; got {type(averager).__name__}"
            )
        self.optim = optim
        """The local optimizer of this rank."""
        self.averager = averager
        """The averager."""
        self._average_state = average_state
        self._buffers = [one for one in buffers if has_mean(one)]
        self._is_checked = False
        self.__setstate__({})  # makes torch's lists of hooks, and a step() that calls them

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of the inner optimizer."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the inner optimizer."""
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Defaults of the inner optimizer."""
        return self.optim.defaults

    def __repr__(self) -> str:
        return repr(self.optim)

    @with_own_step_hooks  # the inner optimizer calls the global hooks
    @disable_compile
    def step(
        self, closure: Callable[[], Any] | None = None, *, extra: Mapping[str, Any] | None = None
    ) -> Any:
        """Make the local step, then average over ranks if it is due.

        Args:
            closure: re-evaluates the model and returns the loss; passed to the inner optimizer.
            extra: input of a TorchOptimizer besides gradients; passed to the inner optimizer.

        Returns:
            The result of the inner optimizer.

        Raises:
            RuntimeError: the hook of these parameters has another warm-up than the averager.
            ValueError, TransportError: from the averager.
        """
        if closure is None and is_called_by(STATE_HELPERS):
            return self.optim.step()  # the learning rate and all gradients are 0
        if not self._is_checked:
            self._check_hooks()
            if isinstance(self.averager, ModelAverager) and self.averager.step == 0:
                self.averager.begin()
            self._is_checked = True
        loss = self._local_step(closure, {} if extra is None else {"extra": extra})
        if self._average_state or self._buffers:
            further = [*(self._averaged_state() if self._average_state else ()), *self._buffers]
            self.averager.average_parameters(self.param_groups, further)
        else:
            self.averager.average_parameters(self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, by the inner optimizer."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer. All ranks must add the same group."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict, with ``"step"`` and ``"averaging"``.

        ``"step"`` is the averager's. ``"averaging"`` has the hook's count; the buckets of its last
        backward pass, by positions of parameters; PowerSGD's state; the averager's state dict.
        """
        found = dict(self.optim.state_dict())
        found[STEP] = self.averager.step
        params = params_in(self.param_groups)
        averaging = save_hooks(params)
        memories = HOOK_MEMORIES.find(params)
        if memories:
            averaging[POWER_SGD] = [memory.state_dict() for memory in memories]
        if isinstance(self.averager, ModelAverager):
            averaging["averager"] = self.averager.state_dict()
        found[AVERAGING] = averaging
        return found

    @disable_compile
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a checkpoint of this class, or of the inner optimizer.

        Without ``"step"``, the averager starts at 0 (if it has no other state), with a warning.

        Args:
            state_dict: not changed.

        Raises:
            ValueError: state of PowerSGD without a memory for it, or of other parameters; missing
                or different state of the averager; nothing is changed.
        """
        averaging = state_dict.get(AVERAGING, {})
        memories = self._memories_for(averaging.get(POWER_SGD, ()))
        own = {key: value for key, value in state_dict.items() if key not in {STEP, AVERAGING}}
        step, ours = int(state_dict.get(STEP, 0)), isinstance(self.averager, ModelAverager)
        of_averager = {**averaging.get("averager", {}), STEP: step}
        if ours:
            self.averager.check(of_averager)
        before = self.optim.state_dict()
        self.optim.load_state_dict(own)
        if ours:
            try:
                self.averager.load_state_dict(of_averager)
            except Exception:
                self.optim.load_state_dict(before)
                raise
        else:
            self.averager.step = step
        if STEP not in state_dict:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. "
                "Setting step counter to 0.",
                stacklevel=2,
            )
        load_hooks(params_in(self.param_groups), averaging)
        for memory, saved in memories:
            memory.load_state_dict(saved)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Register a hook on the inner optimizer, whose ``state_dict`` runs."""
        return self.optim.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Register a hook on the inner optimizer, whose ``state_dict`` runs."""
        return self.optim.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Register a hook on the inner optimizer, whose ``load_state_dict`` runs."""
        return self.optim.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Register a hook on the inner optimizer, whose ``load_state_dict`` runs."""
        return self.optim.register_load_state_dict_post_hook(hook, prepend)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def _local_step(self, closure: Callable[[], Any] | None, kwargs: Mapping[str, Any]) -> Any:
        """Step the inner optimizer, unless a GradScaler found gradients that are not finite."""
        scaling = Scaling.of(self)
        if scaling.found:
            return None
        scaling.unscale_(param.grad for param in params_in(self.param_groups))
        return self.optim.step(**kwargs) if closure is None else self.optim.step(closure, **kwargs)

    def _memories_for(
        self, saved: Sequence[Mapping[str, Any]]
    ) -> list[tuple[Any, Mapping[str, Any]]]:
        """Return each memory of these parameters, with the state dict that it is to load."""
        memories = HOOK_MEMORIES.find(params_in(self.param_groups)) if saved else []
        if len(memories) != len(saved):
            raise ValueError(
                f"the checkpoint has what {len(saved)} memories of PowerSGD had, and "
                f"{len(memories)} serve these parameters; make PowerSGDMemory(state, ddp) before "
                f"loading, or delete state_dict[{AVERAGING!r}][{POWER_SGD!r}] to begin without"
            )
        for memory, one in zip(memories, saved, strict=True):
            memory.check(one)
        return list(zip(memories, saved, strict=True))

    def _averaged_state(self) -> list[Tensor]:
        return [
            value
            for param in params_in(self.param_groups)
            for name, value in self.state.get(param, {}).items()
            if name != STEP  # a floating 0-d tensor in torch
            and isinstance(value, Tensor)
            and value.shape == param.shape
            and has_mean(value)
        ]

    def _check_hooks(self) -> None:
        warmup = getattr(self.averager, "warmup_steps", None)
        if warmup is None:
            return
        for state in HOOK_STATES.find(params_in(self.param_groups)):
            if state.start_localSGD_iter != warmup:
                raise RuntimeError(
                    f"the hook averages gradients over all ranks in the first "
                    f"{state.start_localSGD_iter} iterations, the averager averages parameters "
                    f"only after {warmup}; make both from one AveragingSchedule, or give both the "
                    "same number"
                )
