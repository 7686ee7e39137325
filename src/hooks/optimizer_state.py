"""State of a step hook: an optimizer, a DDP module's parameters by name, and their state."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from functional_optim import Optimizer, State
from functional_optim.core.chain import require_gradients_alone
from functional_optim.core.checks import check_params, check_writable
from functional_optim.core.links import keeps_shared
from functional_optim.core.local_shards import check_whole
from functional_optim.frontends.loss_scale import Scaling
from functional_optim.frontends.recipe import functional_of
from functional_optim.frontends.torch_checkpoint import own_copy
from functional_optim.kernels import in_place, is_measured
from hooks.arrivals import reduced_by
from hooks.named_groups import NamedGroups
from hooks.usage import may_leave_unused

logger = logging.getLogger(__name__)


class OptimizerState(torch.optim.Optimizer):
    """An optimizer with the parameters and the state that :func:`~hooks.step_hook` steps.

    State is kept by parameter name, never by bucket: DDP changes its buckets after the first
    backward, and a bucket is only a slice of the tree.

    It is a ``torch.optim.Optimizer``, so any scheduler of ``torch.optim.lr_scheduler`` drives it:
    options are read from :attr:`param_groups` in each backward pass. ``zero_grad()`` clears
    gradients. There is no step to call: the hook steps, and calls what was registered by
    ``register_step_post_hook`` when it has stepped the last bucket.

    Args:
        optimizer: any :class:`functional_optim.Optimizer`, or a constructor of one; or a class of
            torch.optim, or a registered one, with that class's options.
        ddp: the DistributedDataParallel module whose hook this is for.
        params: the parameters to step, by name; by default all of ``ddp.module`` that require
            gradients. Others are left to the caller.
        state: where to go on from, as in :attr:`state`; its tensors are taken over, to be stepped
            in place. By default it is ``optimizer.init(params)``.
        executor: how the chain is run over a bucket; by default as ``optimizer`` says.
        options: of the class or constructor, by name.

    Raises:
        TypeError: ``ddp`` is no DistributedDataParallel; a class without functional equivalent; a
            stage that takes inputs beside the gradients.
        ValueError: no parameter, one that DDP is told to ignore or that requires no gradient, or a
            state of another tree.

    Example::

        >>> import torch, torch.distributed as dist
        >>> from functional_optim import adamw
        >>> from hooks import step_hook
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ddp = DistributedDataParallel(torch.nn.Linear(3, 1))
        >>> state = step_hook(ddp, adamw(lr=0.1))
        >>> sorted(state.params)
        ['bias', 'weight']
        >>> scheduler = torch.optim.lr_scheduler.ExponentialLR(state, 0.5)
        >>> ddp(torch.ones(1, 3)).sum().backward()
        >>> state.zero_grad()
        >>> scheduler.step()
        >>> state.param_groups[0]["lr"]
        0.05
        >>> torch.optim.AdamW(ddp.parameters()).load_state_dict(state.state_dict())
        >>> dist.destroy_process_group()
    """

    _opt_called: bool
    # A GradScaler then calls step() with what it knows of the gradients.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: Any,
        ddp: DistributedDataParallel,
        *,
        params: Mapping[str, Tensor] | None = None,
        state: State | None = None,
        executor: str | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(
                "OptimizerState takes the DistributedDataParallel module that the hook is "
                f"registered on, got {type(ddp).__name__}"
            )
        made = functional_of(optimizer, options)
        require_gradients_alone(made, "a communication hook")
        # Not the module itself: its reducer holds the hook, the hook holds this, and the ring would
        # never be freed.
        self.process_group = ddp.process_group
        """The group over which gradients are reduced."""
        self.may_leave_unused = may_leave_unused(ddp)
        """Whether DDP may put zeros into a bucket for a parameter that had no part in the loss."""
        self.reduced: tuple[Tensor, ...] = tuple(reduced_by(ddp).values())
        """All parameters whose gradients DDP reduces, also those that are not stepped here."""
        self.params: dict[str, Tensor] = dict(
            trainable_parameters(ddp) if params is None else params
        )
        """The parameters stepped, by name."""
        check_params(list(self.params.values()), [(name,) for name in self.params])
        check_whole(self.params, "a communication hook")
        check_writable(self.params)
        frozen = [name for name, param in self.params.items() if not param.requires_grad]
        if frozen:
            raise ValueError(
                f"the parameter {frozen[0]!r} does not require gradients, so no bucket would bring "
                "one; leave it out of params="
            )
        if executor is None:
            executor = in_place(made.executor, self.params.values(), made.stages)
        self._groups = NamedGroups(self.params, made.using(executor=executor), state)
        self._names = {id(param): name for name, param in self.params.items()}
        self.__setstate__({})  # torch's lists of hooks

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    @property
    def chain(self) -> Optimizer:
        """The optimizer, with the hyper-parameters that ``set_hyper`` gave it."""
        return self._groups.chain

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The options of the optimizer, by name."""
        return dict(self._groups.defaults)

    @property
    def state(self) -> State:  # type: ignore[override]
        """The state; ``leaves`` is keyed by parameter name.

        Its tensors are stepped in place. Until the first step of a parameter its state is made
        anew when it is looked at, from the parameter and the hyper-parameters of then.
        """
        return self._groups.state_tree()

    @property
    def measured(self) -> bool:
        """Return True if the chain needs all gradients before it can step any parameter.

        So it does where a step makes numbers that belong to no parameter.
        """
        return keeps_shared(self.chain.links) or any(map(is_measured, self.chain.stages))

    def set_hyper(self, **hyper: Any) -> None:
        """Change hyper-parameters, by name, from the next backward on.

        Parameter groups take them too, but those for which an override has a value of its own.

        Raises:
            TypeError: a name that the chain does not have.
            ValueError: a value out of bounds, or an option that the state was not made for.
        """
        self._groups.use(self.chain.replace(**hyper), list(hyper))

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups as of a TorchOptimizer: options are read at each step.

        An optimizer without overrides has one group, of all parameters in their order; else
        parameters with the same stages and hyper-parameters are a group.
        """
        return self._groups.param_groups

    def state_dict(self) -> dict[str, Any]:
        """Hyper-parameters and state in torch's form, all tensors copied.

        TorchOptimizer and the equivalent torch.optim class load it, where their groups are those
        of :attr:`param_groups`: without overrides, one of all parameters in their order here.
        """
        copied: dict[str, Any] = own_copy(self._groups.state_dict())
        return copied

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over hyper-parameters and state in torch's form, from the next backward on.

        Parameters are matched by name where the state dict has names, and else by position. The
        state is in other tensors then, and shares no memory with ``state_dict``.

        Args:
            state_dict: of :meth:`state_dict`, of TorchOptimizer, or of the equivalent class of
                torch.optim. Without names, its parameters were those of :attr:`param_groups` in
                their order.

        Raises:
            ValueError: other groups or names, a state that does not fit the chain; nothing is
                changed then.
        """
        self._groups.load_state_dict(state_dict)

    def name_of(self, param: Tensor) -> str | None:
        """The name of a parameter that is stepped here; None for others."""
        return self._names.get(id(param))

    def step_some(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Step these parameters, in place, by as few calls of a kernel as can be."""
        self._groups.step_some(names, gradients)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step nothing: the hook has stepped, while backward went on.

        Args:
            closure: runs a backward pass, in which the hook steps, and returns the loss.

        Returns:
            What ``closure`` returns. Without one, None; a warning is logged then.

        Raises:
            RuntimeError: a GradScaler calls this, and so the hook stepped by scaled gradients.
        """
        if Scaling.of(self).is_scaled:
            raise RuntimeError(
                "the step hook steps in backward, before a GradScaler can unscale gradients, so it "
                "has stepped by scaled ones: train in bfloat16, which needs no scaler, or take "
                "zero_step_hook(ddp, zero, grad_scaler=...)"
            )
        if closure is not None:
            with torch.enable_grad():
                return closure()
        logger.warning(
            "step() does nothing: parameters are stepped by the communication hook, while backward "
            "goes on; take the call out of the loop"
        )
        return None

    step.hooked = True  # type: ignore[attr-defined]  # torch adds no hooks: see end_iteration

    @torch.optim.Optimizer.profile_hook_step
    def end_iteration(self) -> None:
        """All buckets are stepped: schedulers, and the hooks around steps, see one step."""
        self._opt_called = True  # schedulers of torch warn where they see no step

    def register_step_pre_hook(self, hook: Any) -> NoReturn:
        """Refuse a hook that would come too late.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "a step hook steps a bucket as soon as it is reduced, so nothing can be called before "
            "the whole step: change gradients by stages of the chain (clip_by_global_norm, ...), "
            "or register a post hook"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Refuse a group: the parameters are those of the DDP module.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "the parameters of a step hook are fixed: wrap the module, with the new parameters, in "
            "DistributedDataParallel again, and call step_hook on that"
        )


def trainable_parameters(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters of the wrapped module that require gradients, by name.

    Raises:
        ValueError: DDP is told to ignore one of them, so that no hook would ever step it.
    """
    found = {name: param for name, param in ddp.module.named_parameters() if param.requires_grad}
    ignored = [name for name in found if name in ddp.parameters_to_ignore]
    if ignored:
        raise ValueError(
            f"DDP ignores the parameter {ignored[0]!r}, so its hook would never step it; pass "
            "params= without it, and step it yourself"
        )
    return found
