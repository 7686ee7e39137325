"""Optimizers in backward under DistributedDataParallel: never on a gradient of one rank alone.

A hook on a parameter runs before DDP has reduced the gradient. So parameters that a DDP module
reduces are stepped from its communication hook. To know of DDP modules, a hook of torch's is told
of every module that becomes part of another (from the first call of apply_optimizer_in_backward
on; it costs one type check when modules are made, and nothing when they run). The rest is done
before the forward pass of those.

torch's DDP, at its first forward, looks for ``param._in_backward_optimizers`` too, to register a
hook of its own that needs an accelerator. It does not find the attribute of parameters that are
taken care of here.
"""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from functional_optim._torch import IN_BACKWARD_OPTIMIZERS, ignored_by_ddp, queue_callback
from functional_optim.core.compiling import uncompiled
from hooks.arrivals import reduced_by
from hooks.driver import BucketDriver, gradients_in, when_ready
from hooks.usage import may_leave_unused


@dataclass
class Stepping:
    """Record of how a parameter is stepped. Holds neither the parameter nor its optimizers."""

    hooked: bool = False
    """Whether its own hook is registered."""
    ddp: "weakref.ref[DistributedDataParallel] | None" = None
    """The DDP module that reduces its gradient, and whose communication hook steps it."""
    awaited: "weakref.ref[DistributedDataParallel] | None" = None
    """A DDP module that reduces it, but has not been called since the optimizer was applied."""


@dataclass
class _Watched:
    """Record of a DDP module."""

    applied: int = -1
    """How many times optimizers had been applied when it was last called."""
    stepper: "BackwardStepper | None" = None
    """Its communication hook, where it steps parameters."""
    hiding: RemovableHandle | None = None
    """Of the hook that ends the hiding of an attribute."""


@dataclass
class _Watch:
    """Records of a process."""

    handle: RemovableHandle | None = None
    applied: int = 0
    """How many times optimizers have been applied."""


_PARAMETERS: Any = WeakTensorKeyDictionary()
"""How each parameter with an optimizer in backward is stepped."""
_MODULES: "weakref.WeakKeyDictionary[DistributedDataParallel, _Watched]" = (
    weakref.WeakKeyDictionary()
)
"""All DDP modules."""
_WATCH = _Watch()


def stepping_of(param: Tensor) -> Stepping:
    """Return the record of how a parameter is stepped; a new one, the first time."""
    found: Stepping | None = _PARAMETERS.get(param)
    if found is None:
        found = _PARAMETERS[param] = Stepping()
    return found


def reduced_elsewhere(param: Tensor) -> bool:
    """Return True if a DDP module steps this parameter, so that its own hook must not.

    Raises:
        RuntimeError: one would have to, but could not be told.
    """
    own = stepping_of(param)
    if own.awaited is not None and own.awaited() is not None:
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} has an optimizer in backward, and belongs "
            "to a DistributedDataParallel module that was not called since it was applied: the "
            "gradient is not reduced here, and was not stepped. Apply optimizers before the "
            "forward pass of the DDP module; to go on without DDP, delete it first"
        )
    ddp = None if own.ddp is None else own.ddp()
    if ddp is None:
        return False
    stepper = _MODULES[ddp].stepper
    assert stepper is not None, "made before its parameters were told of it"
    if not stepper.called:
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} has an optimizer in backward and belongs "
            "to a DistributedDataParallel module, but that was not called before this backward "
            "pass, so the gradient is not reduced and was not stepped. Call the DDP module, once "
            "for each backward; to go on without DDP, delete it first"
        )
    return True


def watch_ddp() -> None:
    """Look for DDP modules from now on, and for those that are there already."""
    if _WATCH.handle is None and dist.is_available():
        _WATCH.handle = register_module_module_registration_hook(_at_registration)
        if dist.is_initialized():
            for one in gc.get_objects():
                if issubclass(type(one), DistributedDataParallel):  # asks no proxy for its class
                    _notice(one)


def await_ddp(params: Sequence[Tensor]) -> None:
    """Optimizers were applied: a DDP module of these parameters has to be called before backward.

    One that steps some of them already steps them all.
    """
    _WATCH.applied += 1
    wanted = {id(param) for param in params}
    for ddp in list(_MODULES):
        for _, param in _managed(ddp):
            own = stepping_of(param)
            if id(param) in wanted and (own.ddp is None or own.ddp() is not ddp):
                own.awaited = weakref.ref(ddp)


def _at_registration(owner: torch.nn.Module, name: str, part: Any) -> None:
    """Runs when a module becomes part of another: a DDP module is being made."""
    if name == "module" and isinstance(owner, DistributedDataParallel):
        _notice(owner)
        for path, param in part.named_parameters():
            if param in _PARAMETERS and path not in owner.parameters_to_ignore:
                stepping_of(param).awaited = weakref.ref(owner)


def _notice(ddp: DistributedDataParallel) -> None:
    _MODULES[ddp] = _Watched()
    ddp.register_forward_pre_hook(_before_forward)


def _managed(ddp: DistributedDataParallel) -> list[tuple[str, Tensor]]:
    """Names and parameters whose gradients DDP reduces and somebody steps in backward."""
    return [
        (name, param)
        for name, param in ddp.module.named_parameters()
        if param in _PARAMETERS and name not in ddp.parameters_to_ignore
    ]


def _before_forward(module: DistributedDataParallel, arguments: Any) -> None:
    """Runs before the forward pass of every DDP module."""
    own = _MODULES.setdefault(module, _Watched())
    if own.hiding is not None:
        own.hiding.remove()
        own.hiding = None
    if own.applied != _WATCH.applied:
        _look_at(module, own)
    if own.stepper is not None and torch.is_grad_enabled():
        own.stepper.called = True


def _look_at(module: DistributedDataParallel, own: _Watched) -> None:
    """Take over what is to be stepped in backward."""
    _check_delayed(module)
    managed = _managed(module)
    if managed and own.stepper is None:
        _take_over(module, own, managed)
    for _, param in managed:
        stepping = stepping_of(param)
        stepping.ddp, stepping.awaited = weakref.ref(module), None
    own.applied = _WATCH.applied


def _check_delayed(ddp: DistributedDataParallel) -> None:
    """DDP reduces some of the parameters that it lists as ignored, at a moment of its own."""
    told = set(ignored_by_ddp(ddp.module))
    for name, param in ddp.module.named_parameters():
        if param in _PARAMETERS and name in ddp.parameters_to_ignore and name not in told:
            raise RuntimeError(
                f"the parameter {name!r} has an optimizer in backward, but DDP reduces it late "
                "(delay_all_reduce_named_params); leave it out of one of them"
            )


def _take_over(
    ddp: DistributedDataParallel, own: _Watched, managed: Sequence[tuple[str, Tensor]]
) -> None:
    """Have DDP's communication hook step these parameters."""
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
            f"the parameter {managed[0][0]!r} has an optimizer in backward, which steps from "
            "DDP's communication hook, and this DDP module has another one. Leave that out; or "
            "use hooks.step_hook, which takes any inner hook, in place of optimizers in backward"
        ) from error
    own.stepper = stepper
    own.hiding = _hide(ddp, [param for _, param in managed])


def _hide(ddp: DistributedDataParallel, params: Sequence[Tensor]) -> RemovableHandle:
    """Take the attribute away until the end of this forward pass."""
    kept = [
        (param, getattr(param, IN_BACKWARD_OPTIMIZERS))
        for param in params
        if hasattr(param, IN_BACKWARD_OPTIMIZERS)
    ]
    for param, _ in kept:
        delattr(param, IN_BACKWARD_OPTIMIZERS)

    def give_back(*_: Any) -> None:
        while kept:
            param, optimizers = kept.pop()
            setattr(param, IN_BACKWARD_OPTIMIZERS, optimizers)

    # It also runs where forward fails. It is removed later: not while hooks are being called.
    return ddp.register_forward_hook(give_back, always_call=True)


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
        self._driver = BucketDriver(
            ddp.process_group, reduced.values(), reduced, may_leave_unused=may_leave_unused(ddp)
        )

    @uncompiled
    def hook(self, state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        """As ``register_comm_hook`` takes it."""
        if bucket.index() == 0:
            _at_the_end(self._clear)
        params, buffer = bucket.parameters(), bucket.buffer()
        used = self._driver.ask(params, buffer.device)
        communicated = self._driver.communicate(allreduce_hook, None, bucket)
        return when_ready(buffer, len(params), used, communicated).then(
            lambda done: self._step(*done.value(), params)
        )

    @uncompiled
    def _step(self, buffer: Tensor, used: Sequence[bool], params: Sequence[Tensor]) -> Tensor:
        gradients = gradients_in(buffer, params)
        for param, gradient, counts in zip(params, gradients, used, strict=True):
            own: Stepping | None = _PARAMETERS.get(param)
            if not counts or own is None or own.ddp is None or own.ddp() is not self._ddp():
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
