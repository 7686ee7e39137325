"""Optimizers in backward under DistributedDataParallel.

A hook on a parameter runs before DDP has reduced the gradient, so it must not step. Instead, the
communication hook of the DDP module steps the parameters, once the user has passed the module. A
hook on module registration finds DDP modules that are created later around such parameters. Until
the user passes such a module, backward raises an error.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from functional_optim._torch.distributed import (
    IN_BACKWARD_OPTIMIZERS,
    finish_init,
    ignored_by_ddp,
    queue_callback,
)
from functional_optim.engine.calls import disable_compile
from hooks.buckets import bucket_gradients, reduced_parameters
from hooks.driver import BucketDriver
from hooks.usage import may_leave_unused

Module = DistributedDataParallel


@dataclass
class ParamRecord:
    """Record of the hooks of a parameter. It refers neither to the parameter nor its optimizers."""

    has_hook: bool = False
    """True if the hook on the parameter is registered."""
    ddp: "weakref.ref[Module] | None" = None
    """The DDP module that reduces the gradient; its communication hook steps the parameter."""
    wrapper: "weakref.ref[Module] | None" = None
    """A DDP module around the parameter that the user has not passed yet."""


_PARAMETERS: Any = WeakTensorKeyDictionary()
"""The record of each parameter with an optimizer in backward."""
_STEPPERS: "weakref.WeakKeyDictionary[Module, BackwardStepper]" = weakref.WeakKeyDictionary()
"""The communication hook of each DDP module with optimizers in backward."""
_WATCHING: list[Any] = []
"""Handle of the hook on module registration; empty before optimizers are first applied."""


def record_of(param: Tensor) -> ParamRecord:
    """Return the record of a parameter; create it at the first call."""
    found: ParamRecord | None = _PARAMETERS.get(param)
    if found is None:
        found = _PARAMETERS[param] = ParamRecord()
    return found


def is_stepped_by_ddp(param: Tensor) -> bool:
    """Return True if a DDP module steps this parameter, so that the parameter's hook must not.

    Raises:
        RuntimeError: a DDP module around the parameter was never passed, or was not called.
    """
    record = record_of(param)
    if record.wrapper is not None and record.wrapper() is not None:
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} has an optimizer in backward, and a "
            "DistributedDataParallel module was made around it since: the gradient is not reduced "
            "here, and was not stepped. Call hooks.in_backward.reduce_in_backward(ddp) after "
            "wrapping; to go on without DDP, delete it first"
        )
    ddp = None if record.ddp is None else record.ddp()
    if ddp is None:
        return False
    if not _STEPPERS[ddp].has_forward:
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} has an optimizer in backward and belongs "
            "to a DistributedDataParallel module, but that was not called before this backward "
            "pass, so the gradient is not reduced and was not stepped. Call the DDP module, once "
            "for each backward; to go on without DDP, delete it first"
        )
    return True


def watch_modules() -> None:
    """Record from now on each DDP module that is created around parameters with optimizers."""
    if not _WATCHING and dist.is_available():
        _WATCHING.append(register_module_module_registration_hook(_record_wrapper))


def _record_wrapper(owner: torch.nn.Module, name: str, part: Any) -> None:
    """Record a DDP module around parameters, at the registration of its wrapped module."""
    if name == "module" and isinstance(owner, Module):
        for path, param in part.named_parameters():
            if param in _PARAMETERS and path not in owner.parameters_to_ignore:
                record_of(param).wrapper = weakref.ref(owner)


def check_ddp_argument(ddp: object, params: Mapping[str, Tensor]) -> None:
    """Check the argument ``ddp`` for these named parameters, before anything is changed.

    Raises:
        TypeError: ``ddp`` is neither a DDP module, nor False, nor None.
        ValueError: ``ddp`` is None, and there is a process group; a parameter that is not in the
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
        records = {name: _PARAMETERS.get(param) for name, param in params.items()}
        unknown = [k for k, one in records.items() if not one or not one.ddp or one.ddp() is None]
        if unknown:
            raise ValueError(
                f"there is a process group, and it is not said which module reduces the gradient "
                f"of {unknown[0]} over its ranks: wrap first, and give ddp=module, the "
                "DistributedDataParallel module; or ddp=False where none does"
            )


def reduce_in_backward(ddp: DistributedDataParallel) -> None:
    """Let a DDP module reduce gradients before optimizers in backward step.

    For optimizers that were applied before wrapping. One call, before the first forward pass,
    covers all parameters of the module that DDP reduces.

    Args:
        ddp: the module. It must have no communication hook, except that of optimizers in backward.

    Raises:
        TypeError: ``ddp`` is not a DistributedDataParallel.
        ValueError: none of its parameters has an optimizer in backward.
        RuntimeError: DDP has another communication hook, or delays the reduction of a parameter.

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
    params = [param for param in ddp.module.parameters() if param in _PARAMETERS]
    if not params:
        raise ValueError(
            "no parameter of ddp.module has an optimizer in backward: call "
            "apply_optimizer_in_backward(..., ddp=ddp), which does all of it"
        )
    register_ddp_hook(ddp, params).add_params(params)


def register_ddp_hook(ddp: DistributedDataParallel, params: Iterable[Tensor]) -> "BackwardStepper":
    """Return the stepper of a DDP module; register its communication hook at the first call.

    A RuntimeError says why the hook cannot step these parameters; nothing is changed then.
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


def _check_delayed(ddp: Module, params: set[int]) -> None:
    """Raise an error for parameters that DDP reduces late, although it lists them as ignored."""
    ignored = set(ignored_by_ddp(ddp.module))
    for name, param in ddp.module.named_parameters():
        if id(param) in params and name in ddp.parameters_to_ignore and name not in ignored:
            raise RuntimeError(
                f"the parameter {name!r} has an optimizer in backward, but DDP reduces it late "
                "(delay_all_reduce_named_params); leave it out of one of them"
            )


def _finish_init(ddp: Module) -> None:
    """Let DDP look for optimizers in backward now, and find none.

    At its first forward pass, DDP looks for ``param._in_backward_optimizers``, and would register a
    hook that needs an accelerator. It looks only once.
    """
    removed = [
        (param, getattr(param, IN_BACKWARD_OPTIMIZERS))
        for param in ddp.module.parameters()
        if hasattr(param, IN_BACKWARD_OPTIMIZERS)
    ]
    for param, _ in removed:
        delattr(param, IN_BACKWARD_OPTIMIZERS)
    try:
        finish_init(ddp)
    finally:
        for param, optimizers in removed:
            setattr(param, IN_BACKWARD_OPTIMIZERS, optimizers)


def _before_forward(module: Module, arguments: Any) -> None:
    if torch.is_grad_enabled():
        _STEPPERS[module].has_forward = True


class BackwardStepper:
    """Communication hook of a DDP module: reduce a bucket, then step its parameters.

    The mean has the same bits as that of torch's ``allreduce_hook``. Gradients are views of the
    buckets during backward, and are set to None after DDP ends the backward pass.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        # A weak reference: the reducer of the module refers to the hook, and Python would never
        # free such a cycle.
        self._ddp = weakref.ref(ddp)
        self._stepped: list[Tensor] = []
        self.has_forward = False
        """True if the module was called since it last reduced gradients."""
        reduced = reduced_parameters(ddp)
        self._names = {id(param): name for name, param in reduced.items()}
        self._own: dict[int, str] = {}
        """The names of the parameters that this hook steps, by ``id``."""
        self._driver = BucketDriver(
            ddp.process_group, reduced.values(), reduced, may_leave_unused=may_leave_unused(ddp)
        )

    def add_params(self, params: Iterable[Tensor]) -> None:
        """Step these parameters from now on, except those that DDP does not reduce."""
        for param in params:
            if id(param) in self._names:
                record = record_of(param)
                record.ddp, record.wrapper = self._ddp, None
                self._own[id(param)] = self._names[id(param)]
        self._driver.expect(self._own.values())

    @disable_compile
    def hook(self, state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        """Reduce a bucket, and queue its step; the signature is that of ``register_comm_hook``."""
        position = self._driver.position_of(bucket)
        if position.number == 0:
            # Queued twice: DDP queues its last callback after this one, but before callbacks that
            # are queued at the end of backward.
            queue_callback(lambda: queue_callback(self._clear))
        params = bucket.parameters()
        own = [self._own[id(param)] for param in params if id(param) in self._own]
        start = partial(self._driver.communicate, allreduce_hook, None, bucket)
        return self._driver.run(bucket, position, own, params, start, partial(self._step, params))

    @disable_compile
    def _step(self, params: Sequence[Tensor], buffer: Tensor, used: Sequence[bool]) -> Tensor:
        gradients = bucket_gradients(buffer, params)
        for param, gradient, is_used in zip(params, gradients, used, strict=True):
            if not is_used or id(param) not in self._own:
                continue
            # Kept until the end of backward: DDP copies the bucket to .grad, now onto itself.
            param.grad = gradient
            self._stepped.append(param)
            for optimizer in getattr(param, IN_BACKWARD_OPTIMIZERS, ()):
                optimizer.step()
        return buffer

    def _clear(self) -> None:
        self.has_forward = False
        stepped, self._stepped = self._stepped, []
        for param in stepped:
            param.grad = None
