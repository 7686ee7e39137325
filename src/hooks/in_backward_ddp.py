"""Optimizers in backward under DistributedDataParallel: never on a gradient of one rank alone.

A hook on a parameter runs before DDP has reduced the gradient. So parameters that a DDP module
reduces are stepped from its communication hook, once the user has named the module. A module that
is made later around such parameters is noted, by a hook of torch's that is told of every module
that becomes part of another. Until the user names it, backward raises an error.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from functional_optim._torch import (
    IN_BACKWARD_OPTIMIZERS,
    finish_init,
    ignored_by_ddp,
    queue_callback,
)
from functional_optim.core.compiling import uncompiled
from hooks.arrivals import reduced_by
from hooks.communication import Communication
from hooks.driver import BucketDriver, counted, gradients_in
from hooks.usage import UsedFlags, may_leave_unused

Module = DistributedDataParallel


@dataclass
class Stepping:
    """Record of how a parameter is stepped. Holds neither the parameter nor its optimizers."""

    hooked: bool = False
    """Whether its own hook is registered."""
    ddp: "weakref.ref[Module] | None" = None
    """The DDP module that reduces its gradient, and whose communication hook steps it."""
    wrapper: "weakref.ref[Module] | None" = None
    """A DDP module that was made around it, and that nobody has named yet."""


_PARAMETERS: Any = WeakTensorKeyDictionary()
"""How each parameter with an optimizer in backward is stepped."""
_STEPPERS: "weakref.WeakKeyDictionary[Module, BackwardStepper]" = weakref.WeakKeyDictionary()
"""The communication hook of each DDP module that steps in backward."""
_WATCHING: list[Any] = []
"""Handle of the hook that is told of modules; none before optimizers are first applied."""


def stepping_of(param: Tensor) -> Stepping:
    """Return the record of how a parameter is stepped; a new one, the first time."""
    found: Stepping | None = _PARAMETERS.get(param)
    if found is None:
        found = _PARAMETERS[param] = Stepping()
    return found


def is_reduced_elsewhere(param: Tensor) -> bool:
    """Return True if a DDP module steps this parameter, so that its own hook must not.

    Raises:
        RuntimeError: a DDP module was made around it and not named, or was not called.
    """
    own = stepping_of(param)
    if own.wrapper is not None and own.wrapper() is not None:
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} has an optimizer in backward, and a "
            "DistributedDataParallel module was made around it since: the gradient is not reduced "
            "here, and was not stepped. Call hooks.in_backward.reduce_in_backward(ddp) after "
            "wrapping; to go on without DDP, delete it first"
        )
    ddp = None if own.ddp is None else own.ddp()
    if ddp is None:
        return False
    if not _STEPPERS[ddp].called:
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} has an optimizer in backward and belongs "
            "to a DistributedDataParallel module, but that was not called before this backward "
            "pass, so the gradient is not reduced and was not stepped. Call the DDP module, once "
            "for each backward; to go on without DDP, delete it first"
        )
    return True


def watch_modules() -> None:
    """Note from now on each DDP module that is made around parameters with optimizers."""
    if not _WATCHING and dist.is_available():
        _WATCHING.append(register_module_module_registration_hook(_at_registration))


def _at_registration(owner: torch.nn.Module, name: str, part: Any) -> None:
    """Runs when a module becomes part of another: a DDP module is being made."""
    if name == "module" and isinstance(owner, Module):
        for path, param in part.named_parameters():
            if param in _PARAMETERS and path not in owner.parameters_to_ignore:
                stepping_of(param).wrapper = weakref.ref(owner)


def check_named(ddp: object, params: Mapping[str, Tensor]) -> None:
    """Check that it is said which DDP module reduces gradients, before anything is changed.

    Args:
        ddp: the module, False for none, or None where nothing was said.
        params: to be stepped, by the names that errors give them.

    Raises:
        TypeError: ``ddp`` is something else.
        ValueError: nothing was said, and there is a process group; a parameter that is not of the
            module.
    """
    if isinstance(ddp, Module):
        own = set(map(id, ddp.module.parameters()))
        others = [name for name, param in params.items() if id(param) not in own]
        if others:
            raise ValueError(
                f"{others[0]} is no parameter of ddp.module, so that module would never reduce its "
                "gradient; apply optimizers to it in another call, with ddp=False"
            )
    elif ddp is not None and ddp is not False:
        raise TypeError(
            "ddp must be the DistributedDataParallel module that reduces the gradients, or False "
            f"where none does, got {type(ddp).__name__}"
        )
    elif ddp is None and dist.is_available() and dist.is_initialized():
        unknown = [name for name, param in params.items() if _living(param) is None]
        if unknown:
            raise ValueError(
                f"there is a process group, and it is not said which module reduces the gradient "
                f"of {unknown[0]} over its ranks: wrap first, and give ddp=module, the "
                "DistributedDataParallel module; or ddp=False where none does"
            )


def _living(param: Tensor) -> Module | None:
    own: Stepping | None = _PARAMETERS.get(param)
    return None if own is None or own.ddp is None else own.ddp()


def reduce_in_backward(ddp: DistributedDataParallel) -> None:
    """Have a DDP module reduce gradients before the optimizers in backward step by them.

    For optimizers that were applied before the module was wrapped. One call, before the first
    forward pass, does it for all parameters of the module that DDP reduces.

    Args:
        ddp: the module, whose communication hook must be free, or already be that of optimizers in
            backward.

    Raises:
        TypeError: ``ddp`` is no DistributedDataParallel.
        ValueError: none of its parameters has an optimizer in backward.
        RuntimeError: DDP's communication hook is taken, or DDP is to reduce a parameter late.

    Example::

        >>> from hooks import apply_optimizer_in_backward
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> with torch.no_grad():
        ...     _ = model.weight.fill_(1.0)
        >>> apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.5})
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ddp = DistributedDataParallel(model)
        >>> reduce_in_backward(ddp)
        >>> ddp(torch.ones(1, 2)).sum().backward()
        >>> model.weight.tolist()
        [[0.5, 0.5]]
        >>> dist.destroy_process_group()
    """
    if not isinstance(ddp, Module):
        raise TypeError(f"ddp must be a DistributedDataParallel module, got {type(ddp).__name__}")
    params = _with_optimizers(ddp)
    if not params:
        raise ValueError(
            "no parameter of ddp.module has an optimizer in backward: call "
            "apply_optimizer_in_backward(..., ddp=ddp), which does all of it"
        )
    prepare(ddp, params).take_over(params)


def prepare(ddp: DistributedDataParallel, params: Iterable[Tensor]) -> "BackwardStepper":
    """Register the communication hook of a DDP module, if that is not done yet.

    Raises:
        RuntimeError: it cannot step these parameters; nothing is changed.
    """
    _check_delayed(ddp, set(map(id, params)))
    known = _STEPPERS.get(ddp)
    if known is not None:
        return known
    if ddp.mixed_precision is not None:
        raise RuntimeError(
            "optimizers in backward do not work with DDP's mixed_precision, which reduces "
            "gradients of another dtype than the parameters'; use torch.autocast"
        )
    stepper = BackwardStepper(ddp)
    try:
        ddp.register_comm_hook(None, stepper.hook)
    except RuntimeError as error:
        raise RuntimeError(
            "optimizers in backward step from DDP's communication hook, and this DDP module has "
            "another one. Leave that out; or use hooks.step_hook, which takes any inner hook, in "
            "place of optimizers in backward"
        ) from error
    _STEPPERS[ddp] = stepper
    ddp.register_forward_pre_hook(_before_forward)
    _finish_init(ddp)
    return stepper


def _with_optimizers(ddp: Module) -> list[Tensor]:
    """Return the parameters of a module that have optimizers in backward."""
    return [param for param in ddp.module.parameters() if param in _PARAMETERS]


def _check_delayed(ddp: Module, params: set[int]) -> None:
    """DDP reduces some of the parameters that it lists as ignored, at a moment of its own."""
    told = set(ignored_by_ddp(ddp.module))
    for name, param in ddp.module.named_parameters():
        if id(param) in params and name in ddp.parameters_to_ignore and name not in told:
            raise RuntimeError(
                f"the parameter {name!r} has an optimizer in backward, but DDP reduces it late "
                "(delay_all_reduce_named_params); leave it out of one of them"
            )


def _finish_init(ddp: Module) -> None:
    """Have torch's DDP look for optimizers now, without finding any, and never again.

    At its first forward pass it looks for ``param._in_backward_optimizers``, to register a hook of
    its own, which needs an accelerator.
    """
    kept = [
        (param, getattr(param, IN_BACKWARD_OPTIMIZERS))
        for param in ddp.module.parameters()
        if hasattr(param, IN_BACKWARD_OPTIMIZERS)
    ]
    for param, _ in kept:
        delattr(param, IN_BACKWARD_OPTIMIZERS)
    try:
        finish_init(ddp)
    finally:
        for param, optimizers in kept:
            setattr(param, IN_BACKWARD_OPTIMIZERS, optimizers)


def _before_forward(module: Module, arguments: Any) -> None:
    if torch.is_grad_enabled():
        _STEPPERS[module].called = True


class BackwardStepper:
    """The communication hook of a DDP module: reduce a bucket, then step its parameters.

    The mean is made as torch's ``allreduce_hook`` makes it. Gradients are set to None after DDP
    has ended the backward pass; until then they are views of the buckets.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        # Not the module itself: its reducer holds the hook, and the ring would never be freed.
        self._ddp = weakref.ref(ddp)
        self._stepped: list[Tensor] = []
        self.called = False
        """Whether the module was called since it last reduced gradients."""
        reduced = reduced_by(ddp)
        self._names = {id(param): name for name, param in reduced.items()}
        self._own: dict[int, str] = {}
        """The names of the parameters that are stepped here, by identity."""
        self._driver = BucketDriver(
            ddp.process_group, reduced.values(), reduced, may_leave_unused=may_leave_unused(ddp)
        )

    def take_over(self, params: Iterable[Tensor]) -> None:
        """Step these from now on, as far as DDP reduces them."""
        for param in params:
            if id(param) in self._names:
                own = stepping_of(param)
                own.ddp, own.wrapper = self._ddp, None
                self._own[id(param)] = self._names[id(param)]
        self._driver.expect(self._own.values())

    @uncompiled
    def hook(self, state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        """As ``register_comm_hook`` takes it."""
        place = self._driver.place_of(bucket)
        if place.number == 0:
            _at_the_end(self._clear)
        params, buffer = bucket.parameters(), bucket.buffer()
        own = [self._own[id(param)] for param in params if id(param) in self._own]
        self._driver.enter(place, own)
        used = self._driver.ask(params, buffer.device)
        communicated = self._driver.communicate(allreduce_hook, None, bucket)
        return self._driver.follow(
            place.number, lambda: self._step(communicated, used, params), buffer.device
        )

    @uncompiled
    def _step(
        self, communicated: Communication, used: UsedFlags | None, params: Sequence[Tensor]
    ) -> Tensor:
        buffer = communicated.wait()
        gradients, counts = gradients_in(buffer, params), counted(used, len(params))
        for param, gradient, counts_here in zip(params, gradients, counts, strict=True):
            if not counts_here or id(param) not in self._own:
                continue
            # It stays until the end: DDP copies the bucket there, now onto itself.
            param.grad = gradient
            self._stepped.append(param)
            for optimizer in getattr(param, IN_BACKWARD_OPTIMIZERS, ()):
                optimizer.step()
        return buffer

    def _clear(self) -> None:
        self.called = False
        stepped, self._stepped = self._stepped, []
        for param in stepped:
            param.grad = None


def _at_the_end(callback: Any) -> None:
    """Call back at the end of backward, after whatever else waits for it already.

    DDP queues its own last work when its last bucket is ready, which is after this; but before
    what is queued at the end.
    """
    queue_callback(lambda: queue_callback(callback))
