"""State of a step hook: an optimizer, the parameters of a DDP module by name, and their state."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from functional_optim import Optimizer, State
from functional_optim.engine.gradients import Scaling
from functional_optim.engine.recipes import resolve_functional
from functional_optim.engine.stages import has_shared_state, is_measured, require_gradients_alone
from functional_optim.engine.states import own_copy
from functional_optim.engine.tensors import check_no_dtensor, check_params, check_writable
from hooks.buckets import reduced_parameters
from hooks.named_groups import NamedGroups
from hooks.usage import may_leave_unused

logger = logging.getLogger(__name__)


class OptimizerState(torch.optim.Optimizer):
    """Optimizer, parameters and state of :func:`~hooks.step_hook`.

    State is stored by parameter name, not by bucket, because DDP changes its buckets after the
    first backward.

    This is a ``torch.optim.Optimizer``, so schedulers of ``torch.optim.lr_scheduler`` accept it:
    each backward pass reads its options from :attr:`param_groups`. ``zero_grad()`` clears
    gradients. Do not call ``step()``: the hook steps. After the last bucket it calls the hooks of
    ``register_step_post_hook``.

    Args:
        optimizer: any :class:`functional_optim.Optimizer`, or a constructor of one; or a class of
            torch.optim, or a registered one, with that class's options.
        ddp: the DistributedDataParallel module with the hook.
        params: the parameters to step, by name; by default all of ``ddp.module`` that require
            gradients. The hook does not step other parameters.
        state: the state to continue from, as in :attr:`state`; its tensors are stepped in place.
            By default ``optimizer.init(params)``.
        executor: that runs the chain over a bucket; by default that of ``optimizer``.
        options: of the class or constructor, by name.

    Raises:
        TypeError: ``ddp`` is not a DistributedDataParallel; a class without functional equivalent;
            a stage with inputs other than gradients.
        ValueError: no parameter; a parameter that DDP ignores, or that requires no gradient; a
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
    # A GradScaler then calls step() with its scale and its finding of infinities.
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
        functional = resolve_functional(optimizer, options)
        require_gradients_alone(functional, "a communication hook")
        # No reference to the module: its reducer refers to the hook, and the hook to this object.
        # Python would never free such a cycle.
        self.process_group = ddp.process_group
        """The group over which gradients are reduced."""
        self.may_leave_unused = may_leave_unused(ddp)
        """True if DDP may put zeros into a bucket for a parameter that the loss does not use."""
        self.reduced: tuple[Tensor, ...] = tuple(reduced_parameters(ddp).values())
        """All parameters whose gradients DDP reduces, also those that the hook does not step."""
        self.params: dict[str, Tensor] = dict(
            trainable_parameters(ddp) if params is None else params
        )
        """The parameters to step, by name."""
        check_params(list(self.params.values()), [(name,) for name in self.params])
        check_no_dtensor(self.params, "a communication hook")
        check_writable(self.params)
        frozen = [name for name, param in self.params.items() if not param.requires_grad]
        if frozen:
            raise ValueError(
                f"the parameter {frozen[0]!r} does not require gradients, so no bucket would bring "
                "one; leave it out of params="
            )
        self._groups = NamedGroups(self.params, functional.using(executor=executor), state)
        self._names = {id(param): name for name, param in self.params.items()}
        self.__setstate__({})  # makes torch's lists of hooks

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    @property
    def chain(self) -> Optimizer:
        """The optimizer, with the hyper-parameters set by ``set_hyper``."""
        return self._groups.chain

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The options of the optimizer, by name."""
        return dict(self._groups.defaults)

    @property
    def state(self) -> State:  # type: ignore[override]
        """The state; ``leaves`` is keyed by parameter name.

        Its tensors are stepped in place. Before the first step of a parameter, each read computes
        its state again, from the current parameter and hyper-parameters.
        """
        return self._groups.state_tree()

    @property
    def measured(self) -> bool:
        """Return True if the chain needs all gradients before it can step any parameter.

        This includes chains whose steps change shared scalars.
        """
        shares = has_shared_state(self.chain.links, self.chain.overrides)
        return shares or any(map(is_measured, self.chain.stages))

    def explain(self) -> str:
        """Return how the executor steps each kind of parameter: see :meth:`Optimizer.explain`."""
        return self._groups.explain()

    def set_hyper(self, **hyper: Any) -> None:
        """Change hyper-parameters, by name, from the next backward on.

        Parameter groups get the new values too, except where an override sets another value.

        Raises:
            TypeError: the chain has no hyper-parameter of this name.
            ValueError: a value out of bounds, or an option that does not fit the state.
        """
        self._groups.use(self.chain.replace(**hyper), list(hyper))

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups as in a TorchOptimizer; options are read at each step.

        Without overrides there is one group, of all parameters in order. Otherwise parameters with
        the same stages and hyper-parameters form a group.
        """
        return self._groups.param_groups

    def state_dict(self) -> dict[str, Any]:
        """Return hyper-parameters and state in torch's form, with copies of all tensors.

        TorchOptimizer and the equivalent torch.optim class can load it if their groups equal
        :attr:`param_groups`: without overrides, one group of all parameters in the same order.
        """
        copied: dict[str, Any] = own_copy(self._groups.state_dict())
        return copied

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load hyper-parameters and state in torch's form; the next backward uses them.

        Parameters are matched by name if the state dict has names, otherwise by position. The new
        state is copied: it shares no memory with ``state_dict``.

        Args:
            state_dict: of :meth:`state_dict`, of TorchOptimizer, or of the equivalent class of
                torch.optim. Without names, its parameters must be those of :attr:`param_groups`, in
                the same order.

        Raises:
            ValueError: other groups or names, or a state that does not fit the chain; nothing is
                changed.
        """
        self._groups.load_state_dict(state_dict)

    def name_of(self, param: Tensor) -> str | None:
        """Return the name of a parameter; None if the hook does not step it."""
        return self._names.get(id(param))

    def step_some(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Step these parameters in place, in as few kernel calls as possible."""
        self._groups.step_some(names, gradients)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do nothing, except call ``closure``: the hook has stepped during backward.

        Args:
            closure: runs a backward pass, in which the hook steps, and returns the loss.

        Returns:
            The result of ``closure``. Without closure, None, and a warning is logged.

        Raises:
            RuntimeError: a GradScaler called this, so the hook has stepped by scaled gradients.
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

    step.hooked = True  # type: ignore[attr-defined]  # end_iteration calls torch's hooks

    @torch.optim.Optimizer.profile_hook_step
    def end_iteration(self) -> None:
        """Let schedulers and step hooks of torch see one step: all buckets are stepped."""
        self._opt_called = True  # torch's schedulers warn if there was no step

    def register_step_pre_hook(self, hook: Any) -> NoReturn:
        """Raise an error: a bucket is stepped before the step as a whole is known.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "a step hook steps a bucket as soon as it is reduced, so nothing can be called before "
            "the whole step: change gradients by stages of the chain (clip_by_global_norm, ...), "
            "or register a post hook"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Raise an error: the parameters are those of the DDP module.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "the parameters of a step hook are fixed: wrap the module, with the new parameters, in "
            "DistributedDataParallel again, and call step_hook on that"
        )


def trainable_parameters(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the parameters of the wrapped module that require gradients, by name.

    Raises ValueError if DDP ignores one of them: no hook would ever step it.
    """
    found = {name: param for name, param in ddp.module.named_parameters() if param.requires_grad}
    ignored = [name for name in found if name in ddp.parameters_to_ignore]
    if ignored:
        raise ValueError(
            f"DDP ignores the parameter {ignored[0]!r}, so its hook would never step it; pass "
            "params= without it, and step it yourself"
        )
    return found
